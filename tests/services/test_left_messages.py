"""When a client sends the messages that a job has left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.wiring.left_messages import _find_end_state

RUNNING = JobStatus(job_id="17", state=JobState.RUNNING, observed_at=1000.0)
LOST = replace(RUNNING, state=JobState.NODE_FAIL, end_time=900)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (RUNNING, ""),
        (LOST, "NODE_FAIL"),
        (replace(LOST, source="record"), ""),  # Slurm has not confirmed the end, and may requeue the job
        (replace(LOST, state=JobState.UNKNOWN), ""),
        (replace(LOST, end_time=1000 - 8 * 86400), None),
    ],
)
def test_only_a_recent_end_that_slurm_reports_is_a_message(status: JobStatus, state: str | None) -> None:
    assert _find_end_state(status, 1000.0) == state
