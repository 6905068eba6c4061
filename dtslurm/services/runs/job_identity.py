"""Distinguish a run's job from another job with the same job id."""

from __future__ import annotations

import re
from datetime import datetime

from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobStatus

_MARK = re.compile(r"dtslurm:[0-9a-f]+(?::[0-9a-f]+)?")
_MAX_CLOCK_SKEW_S = 600.0
_SLURM_SOURCES = {"squeue", "sacct", "scontrol"}


def belongs_to_run(record: JobRecord, status: JobStatus) -> bool:
    """Return whether a status is of this run's job: a controller that lost its state reuses job ids.

    squeue shows job comments unless the site hides them; accounting shows them if the site stores them. A job
    without a comment belongs to the run if it has the run's name and is no older than the run.
    """
    marks = _MARK.findall(status.comment)
    if marks or status.source not in _SLURM_SOURCES:
        return record.comment in marks or not marks
    submit_time = status.submit_time or status.start_time
    is_older = submit_time is not None and submit_time < record.created_at - _MAX_CLOCK_SKEW_S
    return status.name in {"", record.name} and not is_older


def describe_reused_id(record: JobRecord) -> str:
    """Return the message for a run whose job id belongs to another job now."""
    return (
        f"job {record.job_id} is no longer this run's job: the controller lost the run's job and "
        "reused its number"
    )


def describe_job(status: JobStatus) -> str:
    """Describe a job's name, submission time and comment, as evidence of its owner."""
    parts = [f"Slurm shows job {status.job_id} {status.name or 'without a name'}"]
    if status.submit_time is not None:
        parts.append(f"submitted {datetime.fromtimestamp(status.submit_time):%Y-%m-%d %H:%M:%S}")
    parts.append(f"with comment {status.comment}" if status.comment else "without a comment")
    return ", ".join(parts)
