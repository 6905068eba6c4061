"""Job files with sweeps and stages: refused files and dry runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

TWO = """\
cluster: local
time: 5
stages:
  prepare: {script: train.py}
  train:
    script: train.py
    needs: [prepare]
    args: ["${lr}", "$${HOME}"]
    env: {TAG: "lr${lr}"}
    sweep: {grid: {lr: [1, 2, 3]}, max_parallel: 2}
"""


def write_job_file(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(text)
    (folder / "job.yaml").chmod(0o644)


def assert_no_run(run: Run) -> None:
    assert json.loads(run("status", "--json", code=0).stdout)["runs"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: {script: train.py, needs: [b]}, b: {script: train.py, needs: [a]}}", "wait for each other: "),
        (
            "{a: {script: train.py}, b: {script: gone.py, needs: [a]}}",
            "stage b: script gone.py does not exist",
        ),
        (
            "{a: {script: train.py, sweep: {grid: {x: [1, 1]}}, args: ['${x}']}}",
            "trials 0 and 1 of the sweep have the same name: x=1",
        ),
        (
            "{a: {script: train.py, sweep: {grid: {x: [1]}, when: x > 1}, args: ['${x}']}}",
            "exclude every point",
        ),
        (
            "{a: {script: train.py, nodes: 2, sweep: {grid: {x: [1]}, trials_per_node: 2}, args: ['${x}']}}",
            "set nodes to 1",
        ),
        (
            "{a: {script: train.py, sweep: {grid: {x: [1]}, trials_per_gpu: 2}, args: ['${x}']}}",
            "trials_per_gpu needs gpus_per_node",
        ),
    ],
)
def test_an_invalid_sweep_or_stage_is_refused_before_submission(
    folder: Path, run: Run, text: str, message: str
) -> None:
    write_job_file(folder, f"cluster: local\ntime: 5\nstages: {text}\n")
    assert message in run("submit", "job.yaml", code=2).stderr
    assert_no_run(run)


def test_a_sweep_of_a_million_points_is_refused_without_yes(folder: Path, run: Run) -> None:
    axes = ", ".join(f"{name}: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]" for name in "abcdef")
    args = ", ".join(f"'${{{name}}}'" for name in "abcdef")
    write_job_file(
        folder, f"cluster: local\nscript: train.py\ntime: 5\nargs: [{args}]\nsweep: {{grid: {{{axes}}}}}\n"
    )
    stderr = run("submit", "job.yaml", code=2).stderr
    assert "the sweep has 1,000,000 points, and no job was queued" in stderr
    assert "--yes" in stderr
    assert_no_run(run)


def test_a_dry_run_shows_the_script_of_each_stage_and_the_trial_variables(folder: Path, run: Run) -> None:
    write_job_file(folder, TWO)
    script = run("submit", "job.yaml", "--dry-run", code=0).stdout
    assert script.count("#!/bin/bash\n#SBATCH") == 2
    assert 'trial.py" --env=TAG -- ' in script
    assert "'${lr}'" in script
    assert "'$${HOME}'" in script
    assert "#SBATCH --array=0-2%2" in script
    assert "export DTSLURM_STAGE_PREPARE_DIR=" in script
    assert_no_run(run)


def test_only_selects_a_stage(folder: Path, run: Run) -> None:
    write_job_file(folder, TWO)
    assert "select a stage with --only: prepare, train" in run("render", "job.yaml", code=2).stderr
    assert "#SBATCH --job-name=prepare" in run("render", "job.yaml", "--only", "prepare", code=0).stdout
    assert "is a sweep" in run("render", "job.yaml", "--only", "train", code=2).stderr
    assert "did you mean 'train'" in run("render", "job.yaml", "--only", "trian", code=2).stderr
    assert "--only needs a job file" in run("render", "--only", "a", "train.py", code=2).stderr
    assert "select one with --only NAME" in run("submit", "job.yaml", "--", "--more", code=2).stderr
    assert "--once is for a single job" in run("submit", "job.yaml", "--once", "k", code=2).stderr
    assert "--wait waits for all" in run("submit", "job.yaml", "-f", code=2).stderr


def test_sweep_commands_refuse_a_run_without_a_sweep(folder: Path, run: Run) -> None:
    del folder
    token = run(
        "submit", "--cluster", "local", "-t", "1", "--parsable", "--wait", "train.py", code=0
    ).stdout.strip()
    assert "is not a sweep" in run("sweep", "status", token, code=2).stderr
    assert "no run 'nothing'" in run("sweep", "results", "nothing", code=3).stderr
