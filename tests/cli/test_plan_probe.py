"""``dtslurm plan --probe``: what is refused before anything is queued, and layouts that were run before."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtslurm.services.submit.probe import LAYOUT_KEYS, PLACEHOLDERS
from tests.cli.conftest import Run
from tests.cli.slurm_programs import Programs

ROOT = Path(__file__).parents[2]
PLAN = ("plan", "gpt2", "--cluster", "small", "--gpus-per-node", "2", "--gbs", "64")
ARGS = ("--", "--tp", "${tp}", "--mbs", "${mbs}")


@pytest.fixture(autouse=True)
def cluster(folder: Path) -> Path:
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "small.yaml").write_text("extends: h100x8-ib\n")
    return folder / "cluster_profiles"


def layouts_of(invoke: Run, *words: str) -> list[str]:
    return [
        item["layout"]["text"] for item in json.loads(invoke(*PLAN, *words, "--json").stdout)["candidates"]
    ]


def test_a_plan_that_cannot_tell_layouts_apart_names_the_probe_that_would(invoke: Run) -> None:
    shown = " ".join(invoke("plan", "llama-3-8b", "--cluster", "small", "-N", "2").stdout.split())
    assert re.search(r"10 steps of each of 1, 2[, \d]* would decide: .* GPU-hours \(--top \d --probe", shown)


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ((*PLAN[:2], "--gpu", "H100-80GB", "--probe", "train.py"), "--gpu names only a GPU", "--cluster"),
        (("plan", "llama-3-405b", *PLAN[2:], "--probe", "train.py"), "no layout fits", "more nodes"),
        ((*PLAN, "--layout", "dp=2,gbs=64", "--probe", "train.py"), "shows only one", "leave out --layout"),
        ((*PLAN, "--top", "1", "--probe", "train.py"), "shows only one", "--top"),
        ((*PLAN, "--framework", "fsdp", "--probe", "train.py"), "does not receive the layout", "'${tp}'"),
        ((*PLAN, "--probe", "sweep.yaml"), "needs one training job", "training job alone"),
        ((*PLAN, "--probe", "larger.yaml"), "another size than the plan", "--nodes"),
        ((*PLAN, "--probe", "train.py", "--calibrate", "17"), "only one of --calibrate and --probe", ""),
        ((*PLAN, *ARGS), "there is no --probe: --tp", "--probe train.py"),
    ],
)  # fmt: skip
def test_what_cannot_be_probed_says_why(
    invoke: Run, folder: Path, words: tuple[str, ...], problem: str, hint: str
) -> None:
    (folder / "sweep.yaml").write_text("script: train.py\nargs: ['${lr}']\nsweep: {grid: {lr: [1, 2]}}\n")
    (folder / "larger.yaml").write_text("script: train.py\nargs: ['${tp}']\nnodes: 4\n")
    stderr = invoke(*words, code=2).stderr
    assert problem in stderr.partition("hint: ")[0]
    assert hint in stderr.partition("hint: ")[2]


def test_nothing_is_queued_without_a_script_or_a_yes(invoke: Run, slurm: Programs, cluster: Path) -> None:
    (cluster / "small.yaml").write_text("extends: h100x8-ib\nslurm: {max_array_size: 1001}\n")
    missing = invoke(*PLAN, "--probe", "trian.py", *ARGS, code=2).stderr
    assert "script trian.py does not exist; did you mean 'train.py'?" in missing
    (cluster.parent / "job.yaml").write_text("script: train.py\nlauncher: srun\nargs: ['${tp}']\n")
    unconfirmed = invoke(*PLAN, "--top", "3", "--probe", "job.yaml", code=2).stderr
    assert "10 steps of 3 layouts on 2 GPUs" in unconfirmed
    assert "at most 1.6 GPU-hours (16 min each)" in unconfirmed
    assert "no job was queued" in unconfirmed
    assert "--yes" in unconfirmed
    assert not [words for words in slurm.asked if words.startswith("sbatch ") and "--test-only" not in words
                and "--version" not in words]  # fmt: skip


def test_a_layout_that_failed_leaves_the_ranking_and_a_measured_one_has_its_time(
    invoke: Run, cluster: Path
) -> None:
    first, second, third = layouts_of(invoke, "--top", "3")
    saved = {
        "model": "gpt2", "gpu": "H100-80-SXM", "framework": "megatron", "precision": "bf16", "seq_len": 1024,
        "nodes": 1, "predicted_step_s": 0.1, "predicted_memory_gib": 10.0, "memory_states_gib": 2.0,
        "measured_memory_gib": None,
    }  # fmt: skip
    measurements = [
        {
            **saved,
            "job": "a_0",
            "layout": first,
            "measured_step_s": None,
            "failure": "a GPU ran out of memory",
        },
        {**saved, "job": "a_1", "layout": third, "measured_step_s": 0.101},
    ]
    path = cluster / "small.plan.json"
    path.write_text(json.dumps({"schema": 1, "measurements": measurements}))
    assert layouts_of(invoke, "--top", "2") == [third, second]  # the time of the third is known
    shown = invoke(*PLAN, "--top", "2").stdout
    assert "MEASURED" in shown
    assert f"{first}: failed when it was run: a GPU ran out of memory" in " ".join(shown.split())
    assert layouts_of(invoke, "--seq-len", "512", "--top", "1") != [third]  # another task has its own runs
    words = ("--layout", first)
    assert "it failed when it was run: a GPU ran out of memory" in invoke(*PLAN[:-2], *words).stdout
    path.write_text(json.dumps({"schema": 1, "measurements": [{**measurements[0], "failure": 3}]}))
    assert "is not a calibration file" in invoke(*PLAN, code=2).stderr


def test_measured_layouts_are_not_run_again(invoke: Run, cluster: Path) -> None:
    layouts = layouts_of(invoke, "--top", "2")
    saved = {
        "model": "gpt2", "gpu": "H100-80-SXM", "framework": "megatron", "precision": "bf16", "seq_len": 1024,
        "nodes": 1, "predicted_step_s": 0.1, "predicted_memory_gib": 10.0, "memory_states_gib": 2.0,
        "measured_memory_gib": None, "measured_step_s": 0.05,
    }  # fmt: skip
    measurements = [{**saved, "job": layout, "layout": layout} for layout in layouts]
    (cluster / "small.plan.json").write_text(json.dumps({"schema": 1, "measurements": measurements}))
    words = ("--top", "2", "--probe", "train.py", *ARGS)
    assert "were measured on this cluster" in invoke(*PLAN, *words, code=2).stderr


def test_the_command_and_the_job_of_the_docs_are_accepted(
    invoke: Run, slurm: Programs, cluster: Path
) -> None:
    del slurm
    section = (ROOT / "docs" / "plan.md").read_text().partition("\n## Probe\n")[2].partition("\n## ")[0]
    [command] = re.findall(r"```sh\ndtslurm (.*)\n```", section)
    [job] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (cluster / "mycluster.yaml").write_text("extends: h100x8-ib\n")
    (cluster.parent / "train.yaml").write_text(f"{job}no_check: true\n")  # torch is not installed here
    stderr = invoke(*command.split(), code=2).stderr
    assert "10 steps of 3 layouts on 16 GPUs" in stderr
    assert "no job was queued" in stderr
    assert {f"`${{{name}}}`" for name in set(PLACEHOLDERS) - set(LAYOUT_KEYS) - {"shard"}} <= {
        *re.findall(r"`\$\{\w+\}`", section)
    }
