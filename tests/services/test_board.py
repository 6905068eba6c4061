"""The rows of the dashboard's job list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.job import JobRecord
from dtslurm.model.state import JobState, JobStatus
from dtslurm.services.board import rows_of
from dtslurm.services.status import RunView

RUNNING = JobStatus(job_id="7", state=JobState.RUNNING, restarts=0)


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    named: dict[str, Any] = {"token": "a" * 12, "cluster": "here", "name": "train", "phase": "submitted"}
    return JobRecord(**named, run_dir=str(tmp_path), created_at=90.0, job_id="7")


@pytest.mark.parametrize(
    ("state", "restarts", "there", "attempt"),
    [
        (JobState.RUNNING, 0, (0, 1, 2), 2),  # restarted within the job
        (JobState.RUNNING, 3, (0, 1), 3),  # what it writes has not come over yet
        (JobState.RUNNING, None, (), 0),
        (JobState.COMPLETED, 0, (0, 1), 1),
        (JobState.PENDING, 1, (0,), 1),
    ],
)
def test_the_attempt_is_that_of_the_runs_own_logs_where_slurm_counted_less(
    record: JobRecord, state: JobState, restarts: int | None, there: tuple[int, ...], attempt: int
) -> None:
    for number in there:
        (Path(record.run_dir) / "logs" / str(number)).mkdir(parents=True)
    (row,) = rows_of(RunView(record, (replace(RUNNING, state=state, restarts=restarts),)), {})
    assert row.attempt == attempt
    if state is JobState.RUNNING:
        assert row.about == (f"attempt {attempt}" if attempt else "")


def test_a_task_of_an_array_has_attempts_of_its_own(record: JobRecord) -> None:
    for task, number in (("1", 0), ("2", 1)):
        (Path(record.run_dir) / "tasks" / task / "logs" / str(number)).mkdir(parents=True)
    statuses = tuple(replace(RUNNING, job_id=f"7_{task}") for task in (1, 2))
    _, *tasks = rows_of(RunView(replace(record, array="1-2"), statuses), {})
    assert [(row.task, row.attempt) for row in tasks] == [("1", 0), ("2", 1)]
