from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml

from dtslurm.config import schema
from dtslurm.config.job_files import jobs
from dtslurm.config.job_files.detection import is_job_file
from dtslurm.errors import ProfileInvalid, RequestInvalid
from dtslurm.model.jobs.job_file import JobFile
from dtslurm.services.request.request import INTERNAL, JobRequest

BASE = """\
script: train.py
variables:
  lr: 1e-4
  model: 7b
  tag: ${model}-lr${lr}
args: [--lr, "${lr}", --model, "${model}"]
time: 2:30:00
env: {TAG: "${tag}", SHELLS: "$${HOME} and $HOME"}
setup: [module load a]
"""
OVER = """\
extends: shared/base.yaml
variables: {model: 70b}
nodes: 4
setup: [module load b]
env: {MORE: 1}
"""


def write_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def load_job_file(path: Path, **given: str) -> jobs.LoadedJob:
    return jobs.load(path, given, cwd=path.parent)


def load_problems(path: Path) -> list[str]:
    with pytest.raises(ProfileInvalid) as caught:
        load_job_file(path)
    return list(caught.value.problems)


def test_variables_are_substituted_in_all_values(tmp_path: Path) -> None:
    job = load_job_file(write_file(tmp_path, "job.yaml", BASE), lr="3e-4").job
    assert job.args == ("--lr", "3e-4", "--model", "7b")
    assert job.env == {"TAG": "7b-lr3e-4", "SHELLS": "${HOME} and $HOME"}
    assert str(job.time) == "02:30:00"


def test_a_job_file_can_extend_another_job_file(tmp_path: Path) -> None:
    write_file(tmp_path, "shared/base.yaml", BASE)
    job_file = load_job_file(write_file(tmp_path, "job.yaml", OVER))
    assert job_file.job.args == ("--lr", "1e-4", "--model", "70b")
    assert (job_file.job.nodes, job_file.job.setup) == (4, ("module load b",))
    assert job_file.job.env["MORE"] == "1"
    assert job_file.job.env["TAG"] == "70b-lr1e-4"
    assert job_file.origins["args"] == "shared/base.yaml:6"
    assert job_file.origins["nodes"] == "job.yaml:3"


def test_every_problem_of_a_job_file_is_reported_with_its_position(tmp_path: Path) -> None:
    text = 'script: t.py\nnodess: 3\nargs: ["${LR}"]\nvariables: {a: "${b}", b: "${a}", x y: 1}\ntime: soon\n'
    problems = load_problems(write_file(tmp_path, "job.yaml", text))
    assert [line.split(": ")[:2] for line in problems] == [
        ["job.yaml:2", "nodess"],
        ["job.yaml:3", "args[0]"],
        ["job.yaml:4", "variables.a"],
        ["job.yaml:4", "variables.b"],
        ["job.yaml:4", "variables.x y"],
        ["job.yaml:5", "time"],
    ]
    assert "did you mean 'nodes'" in problems[0]
    assert "$${LR} gives the literal text ${LR}, for the shell in setup or teardown" in problems[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nope.yaml\n", "file nope.yaml does not exist"),
        ("extends: job.yaml\n", "is circular: job.yaml → job.yaml"),
        ("extends: [a]\n", "should be the path of one job file"),
        ("script: a.py\nvariables: [lr]\n", "should be a mapping"),
        ("script: a.py\nvariables: {lr: [1]}\n", "should be a single value"),
        ("nodes: 2\nvariables: {}\n", "script: is missing"),
        ("script: a.py\nnodes: ${n}\nvariables: {n: two}\n", "should be a whole number"),
    ],
)
def test_mistakes_in_a_job_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in line for line in load_problems(write_file(tmp_path, "job.yaml", text)))


def test_only_defined_variables_can_be_set(tmp_path: Path) -> None:
    with pytest.raises(RequestInvalid, match="did you mean 'lr'"):
        load_job_file(write_file(tmp_path, "job.yaml", BASE), lrr="1")
    with pytest.raises(RequestInvalid, match="NAME=VALUE"):
        jobs.assignments(("lr",))


@pytest.mark.parametrize(
    ("name", "text", "is_job"),
    [
        ("job.yaml", "script: train.py\n", True),
        ("job.yml", "nodes: 2\nextends: base.yaml\n", True),
        ("job.yaml", "script: [\n", True),  # broken, but meant as one
        ("llama.yaml", "model_name_or_path: x\nstage: sft\n", False),
        ("train.py", "script: 1\n", False),
    ],
)
def test_a_job_file_is_distinguished_from_a_configuration_file(
    tmp_path: Path, name: str, text: str, *, is_job: bool
) -> None:
    assert is_job_file(write_file(tmp_path, name, text)) is is_job
    assert not is_job_file(tmp_path / "absent.yaml")


def test_every_option_of_submit_can_be_in_a_job_file() -> None:
    names = {item.name for item in fields(JobRequest)} - INTERNAL
    assert {item.name for item in fields(JobFile)} - {"variables", "stages", "roles", "sweep"} == names


def test_the_job_schema_accepts_the_same_files_as_the_loader(tmp_path: Path) -> None:
    checker = jsonschema.Draft202012Validator(schema.job_schema())
    checker.check_schema(checker.schema)
    for text in (BASE, OVER, "script: a.py\nnodes: ${n}\n"):
        assert list(checker.iter_errors(yaml.safe_load(text))) == []
    assert list(checker.iter_errors({"nodess": 3}))


STAGES = """\
time: 60
variables: {size: 7b, lr: 1e-4}
args: [--size, "${size}"]
stages:
  evaluate: {script: evaluate.py, needs: [train]}
  train:
    script: train.py
    needs: ["afterany:prepare"]
    nodes: 2
    args: [--lr, "${lr}", "$${HOME}"]
    sweep: {grid: {lr: [1, 2]}, random: {seed: "randint(0, 9)"}, samples: 2, name: "lr${lr}-${seed}"}
    env: {SEED: "${seed}", SIZE: "${size}"}
  prepare: {script: prepare.py, time: 5}
"""


def test_stages_inherit_top_level_values_and_are_ordered_by_dependency(tmp_path: Path) -> None:
    stages = load_job_file(write_file(tmp_path, "job.yaml", STAGES)).stages
    assert [stage.name for stage in stages] == ["prepare", "train", "evaluate"]
    prepare, train, evaluate = (stage.work for stage in stages)
    assert (str(prepare.time), str(train.time), train.nodes) == ("00:05:00", "01:00:00", 2)
    assert evaluate.args == prepare.args == ("--size", "7b")
    assert [stage.needs for stage in stages] == [(), (("afterany", "prepare"),), (("afterok", "train"),)]
    assert stages[1].origins["nodes"] == "job.yaml:9"


def test_sweep_variables_remain_for_the_trials(tmp_path: Path) -> None:
    train = load_job_file(write_file(tmp_path, "job.yaml", STAGES)).stages[1].work
    assert train.args == ("--lr", "${lr}", "$${HOME}")  # the variable lr of the file stands back
    assert train.env == {"SEED": "${seed}", "SIZE": "7b"}
    assert train.sweep is not None
    assert (train.sweep.name, train.sweep.variables()) == ("lr${lr}-${seed}", ["lr", "seed"])
    with pytest.raises(RequestInvalid, match="sets this variable"):
        load_job_file(tmp_path / "job.yaml", lr="3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "script: a.py\nstages: {a: {needs: [c]}, b: {needs: [a]}, c: {needs: [b]}}\n",
            "job.yaml:2: stages: wait for each other: ",
        ),
        ("stages: {a: {script: a.py, needs: [a]}}\n", "wait for each other: a → a"),
        (
            "stages:\n  train: {script: a.py}\n  b: {script: b.py, needs: [tarin]}\n",
            "job.yaml:3: stages.b.needs: unknown stage 'tarin'; did you mean 'train'?",
        ),
        ("stages: {a: {script: a.py, needs: ['on:a']}}\n", "afterok:NAME"),
        ("stages: {a: {nodes: 1}}\n", "job.yaml:1: stages.a.script: is missing"),
        ("stages: {a: {script: a.py, nodess: 1}}\n", "did you mean 'nodes'?"),
        ("stages: {a: [1]}\n", "should be a mapping, like a job file"),
        ("stages: []\n", "should be a mapping of names to jobs"),
        ("stages: {'a b': {script: a.py}}\n", "a stage name may contain only letters"),
        ("stages: {a-b: {script: a.py}, a_b: {script: a.py}}\n", "is too similar to 'a-b'"),
        ("sweep: {grid: {a: [1]}}\nstages: {a: {script: a.py}}\n", "belongs in a stage"),
        ("script: a.py\nsweep: {grid: {lr: [1]}}\n", "use ${lr} in args or env"),
        ("script: a.py\nargs: ['${lr}']\nsweep: {grid: {lr: []}}\n", "lr has no values"),
        (
            "script: a.py\nargs: ['${a}']\nsweep: {random: {a: 'unif(0, 1)'}, samples: 2}\n",
            "is not one of uniform",
        ),
        (
            "script: a.py\nargs: ['${a}']\nsweep: {grid: {a: [1]}, when: 'b > 0'}\n",
            "'b' is not a variable of the sweep",
        ),
        (
            "script: a.py\nargs: ['${a}']\nnodes: ${a}\nsweep: {grid: {a: [1]}}\n",
            "is allowed only in args and env",
        ),
        (
            "script: a.py\nargs: ['${a}']\narray: 0-3\nsweep: {grid: {a: [1]}}\n",
            "makes a job array; remove array",
        ),
        (
            "script: a.py\nargs: ['${a}']\nsweep: {grid: {a: [1]}, asha: {eta: 1}}\n",
            "eta should be at least 2",
        ),
    ],
)
def test_mistakes_in_stages_and_sweeps_are_named(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in line for line in load_problems(write_file(tmp_path, "job.yaml", text)))


def test_a_setup_entry_may_have_several_lines(tmp_path: Path) -> None:
    job = load_job_file(
        write_file(tmp_path, "job.yaml", "script: a.py\nsetup:\n- |\n  module load a\n  module load b\n")
    ).job
    assert job.setup == ("module load a\nmodule load b\n",)


def test_the_job_schema_accepts_stages_and_sweeps() -> None:
    checker = jsonschema.Draft202012Validator(schema.job_schema())
    assert list(checker.iter_errors(yaml.safe_load(STAGES))) == []
    assert list(checker.iter_errors({"stages": {"a": {"script": "a.py", "need": ["b"]}}}))
    assert list(checker.iter_errors({"script": "a.py", "sweep": {"grids": {}}}))


def test_slurm_variables_are_allowed_only_in_arguments(tmp_path: Path) -> None:
    text = 'script: t.py\narray: 0-3\nargs: ["${SLURM_ARRAY_TASK_ID}", "x-$SLURM_JOB_ID"]\n'
    assert load_job_file(write_file(tmp_path, "job.yaml", text)).job.args == (
        "${SLURM_ARRAY_TASK_ID}",
        "x-$SLURM_JOB_ID",
    )
    [problem] = load_problems(write_file(tmp_path, "other.yaml", f"{text}env: {{A: '${{SLURM_JOB_ID}}'}}\n"))
    assert "env.A: no variable 'SLURM_JOB_ID'" in problem
