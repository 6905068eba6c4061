"""One task of an array: the word that means it, and what is seen of it."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.errors import JobNotFound
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.job_table import JobTable
from dtslurm.services.runs.status import RunView
from dtslurm.slurm.arrays import task_ranges


def number_in(selector: str | None, job_id: str | None) -> str | None:
    """Return the array task in a selector like ``17_3``."""
    head, _, task = (selector or "").partition("_")
    return task if task.isdecimal() and head == job_id else None


def task_of(selector: str | None, record: JobRecord) -> str | None:
    """Return the task of a run that a selector means; None for all of the run.

    Raises:
        JobNotFound: the run has no such task.
    """
    task = number_in(selector, record.job_id)
    if task is None:
        return None
    if record.array is None:
        raise JobNotFound(f"there is no task {task} of job {record.job_id}: it is no array")
    if not any(int(task) in tasks for tasks in task_ranges(record.array)):
        raise JobNotFound(f"there is no task {task} of job {record.job_id}, only {record.array}")
    return str(int(task))


def only(view: RunView, task: str | None) -> RunView:
    """Return what is seen of one task; of the whole run for None."""
    if task is None:
        return view
    job_id = f"{view.record.job_id}_{task}"
    seen = JobTable(view.statuses).belonging(job_id)
    unseen = JobStatus(job_id=job_id, state=JobState.UNKNOWN, reason="nothing is known of this task")
    return replace(view, statuses=tuple(seen) or (unseen,))
