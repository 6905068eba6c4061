"""The messages after a submission and after the end of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtslurm.cli.printing.summary import show_end
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from tests.cli.conftest import Run


def end_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *ended: tuple[str, JobState], **values: Any
) -> str:
    record = JobRecord(
        token="t", script_hash="", cluster="here", name="train", run_dir=str(tmp_path), phase="submitted",
        created_at=1.0, job_id="17", **values,
    )  # fmt: skip
    statuses = tuple(JobStatus(job_id=job, state=state, exit_code=143) for job, state in ended)
    context = Context(cwd=tmp_path, env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})
    show_end(context, RunView(record, statuses))
    return capsys.readouterr().err


def write_first_failure(place: Path, code: int) -> None:
    for folder in ("logs", "ranks"):
        (place / folder / "0").mkdir(parents=True)
    (place / "ranks" / "0" / "first-failure").write_text(f"2 {code}\n")


def test_a_timeout_is_not_described_as_a_rank_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_first_failure(tmp_path, 143)
    said = end_text(tmp_path, capsys, ("17", JobState.TIMEOUT))
    assert "\n  the time limit was reached\n" in said
    assert "failed first" not in said


def test_exit_code_85_is_described_as_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_first_failure(tmp_path, 85)
    said = end_text(tmp_path, capsys, ("17", JobState.FAILED))
    assert "\n  rank 2 saved a checkpoint and ended with 85, which requests a requeue\n" in said
    assert "failed first" not in said


def test_the_end_summary_describes_each_array_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_first_failure(tmp_path / "tasks" / "3", 143)
    write_first_failure(tmp_path / "tasks" / "4", 7)
    ends = (("17_3", JobState.TIMEOUT), ("17_4", JobState.FAILED), ("17_5", JobState.COMPLETED))
    said = end_text(tmp_path, capsys, *ends, array="3-5")
    assert "  task 3: the time limit was reached\n" in said
    assert "  task 4: rank 2 failed first, with exit code 7\n" in said


@pytest.mark.slow
def test_a_stage_that_never_started_and_a_repeated_submission_are_explained(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    here = {"XDG_STATE_HOME": str(tmp_path), "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
    (folder / "train.py").write_text("raise SystemExit(7)")
    (folder / "job.yaml").write_text(
        "time: 5\nstages:\n  a: {script: train.py}\n  b: {script: train.py, needs: [a]}\n"
    )
    done = run("submit", "--cluster", "local", "--wait", "job.yaml", code=7, **here)
    assert "(b): CANCELLED\n  the job on which it depends did not end as required\n" in done.stderr
    once = ("submit", "--cluster", "local", "-t", "5", "--once", "k", "train.py")
    assert "submitted job 3 (train) to local" in run(*once, code=0, **here).stderr
    assert "job 3 (train) was submitted before, to local" in run(*once, code=0, **here).stderr
