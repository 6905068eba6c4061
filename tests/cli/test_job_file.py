from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

JOB = """\
cluster: local
script: train.py
args: [--lr, "${lr}"]
variables: {lr: 1e-4}
ntasks_per_node: 2
launcher: srun
time: 10
env: {A: file}
"""


@pytest.fixture
def job_file(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB)
    path.chmod(0o644)
    return path


@pytest.mark.usefixtures("job_file")
def test_the_command_line_overrides_the_job_file(run: Run) -> None:
    words = ("-t", "20", "--set", "lr=3e-4", "--env", "A=line", "--", "--more", "1")
    script = run("render", "job.yaml", *words, code=0).stdout
    assert "train.py --lr 3e-4 --more 1" in script
    assert "#SBATCH --time=00:20:00" in script
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "export A=line" in script
    assert "export A=file" not in script


@pytest.mark.usefixtures("job_file")
def test_options_may_precede_the_job_file(run: Run) -> None:
    script = run("render", "-t", "20", "job.yaml", code=0).stdout
    assert "#SBATCH --time=00:20:00" in script


@pytest.mark.usefixtures("job_file")
def test_json_shows_the_origin_of_each_value(run: Run) -> None:
    origins = json.loads(run("render", "--json", "job.yaml", "-N", "1", code=0).stdout)["origins"]
    assert origins["args"] == "job.yaml:3"
    assert origins["env"] == "job.yaml:8"
    assert origins["cluster"] == "job.yaml:1"
    assert origins["nodes"] == "command line"


def test_the_job_file_overrides_the_project_file(folder: Path, job_file: Path, run: Run) -> None:
    project = folder / "dtslurm.yaml"
    project.write_text("defaults: {time: 99, account: mine, env: {A: project}}\n")
    project.chmod(0o644)
    script = run("render", job_file.name, code=0).stdout
    assert "#SBATCH --time=00:10:00" in script
    assert "#SBATCH --account=mine" in script
    assert "export A=file" in script


@pytest.mark.usefixtures("job_file")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("job.yaml", "--set", "lrr=1"), "did you mean 'lr'"),
        (("job.yaml", "--set", "lr"), "write NAME=VALUE"),
        (("job.yaml", "--nodess", "3"), "No such option '--nodess'"),
        (("--set", "lr=1", "train.py"), "needs a job file"),
        (("absent.yaml",), "script absent.yaml does not exist"),
    ],
)
def test_an_invalid_job_file_request_is_reported(run: Run, words: tuple[str, ...], message: str) -> None:
    assert message in run("submit", *words, code=2).stderr


def test_tracker_settings_become_environment_variables(folder: Path, job_file: Path, run: Run) -> None:
    job_file.write_text(JOB + "tracker: [wandb]\ntracking: {project: llm, tags: x}\n")
    script = run("render", "job.yaml", "--tracking", "tags=y", "--env", "WANDB_MODE=offline", code=0).stdout
    assert "export WANDB_PROJECT=llm" in script
    assert "export WANDB_TAGS=y,cluster:local" in script
    assert script.count("WANDB_MODE") == 1
    (folder / "train.py").write_text("")
    stderr = run("render", "--cluster", "local", "--tracker", "wandbb", "train.py", code=2).stderr
    assert "did you mean 'wandb'" in stderr


def test_words_after_a_script_are_arguments_of_the_script(folder: Path, run: Run) -> None:
    (folder / "train.py").write_text("print(1)\n")
    script = run("render", "--cluster", "local", "-l", "srun", "train.py", "--set", "lr=1", code=0).stdout
    assert "train.py --set lr=1" in script


@pytest.mark.parametrize(("value", "line"), [("true", "--requeue"), ("false", "--no-requeue")])
def test_a_job_file_decides_whether_slurm_may_requeue(
    folder: Path, job_file: Path, run: Run, value: str, line: str
) -> None:
    (folder / "train.py").write_text(
        "from dtslurm import train\nwith train.session() as run:\n    run.restore()\n"
    )
    script = run("render", job_file.name, code=0).stdout
    assert "#SBATCH --requeue\n" in script  # the training continues from its checkpoints
    job_file.write_text(f"{JOB}requeue: {value}\n")
    assert f"#SBATCH {line}\n" in run("render", job_file.name, code=0).stdout
