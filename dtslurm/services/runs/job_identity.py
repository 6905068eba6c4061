"""Tells a run's own job from another that goes by its number."""

from __future__ import annotations

import re
from datetime import datetime

from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobStatus

_MARK = re.compile(r"dtslurm:[0-9a-f]+(?::[0-9a-f]+)?")
_CLOCKS_DIFFER_S = 600.0
_OF_SLURM = {"squeue", "sacct", "scontrol"}


def belongs_to_run(record: JobRecord, status: JobStatus) -> bool:
    """Whether an observation is of this run's job: a restarted controller gives its number to another.

    squeue shows a job's comment unless the site forbids it; accounting does so where the site keeps it. Where
    there is none, the job has the run's name, and is no older than the run.
    """
    marks = _MARK.findall(status.comment)
    if marks or status.source not in _OF_SLURM:
        return record.comment in marks or not marks
    began = status.submit_time or status.start_time
    old = began is not None and began < record.created_at - _CLOCKS_DIFFER_S
    return status.name in {"", record.name} and not old


def describe_reused_id(record: JobRecord) -> str:
    """Return what there is to say where no observation of its number is of the run's job."""
    return f"job {record.job_id} is another one now: the controller lost this run's and reused its number"


def describe_job(status: JobStatus) -> str:
    """Return an observation as evidence of whose job it is."""
    words = [f"Slurm shows job {status.job_id} {status.name or 'without a name'}"]
    if status.submit_time is not None:
        words.append(f"submitted {datetime.fromtimestamp(status.submit_time):%Y-%m-%d %H:%M:%S}")
    words.append(f"with comment {status.comment}" if status.comment else "without a comment")
    return ", ".join(words)
