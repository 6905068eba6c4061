"""Selectors and views of single array tasks."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.errors import JobNotFound
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.job_table import JobTable
from dtslurm.services.runs.status import RunView
from dtslurm.slurm.arrays import task_ranges


def number_in(selector: str | None, job_id: str | None) -> str | None:
    """Return the array task of a selector such as ``17_3``; None if it selects no task of ``job_id``."""
    array_id, _, task = (selector or "").partition("_")
    return task if task.isdecimal() and array_id == job_id else None


def task_of(selector: str | None, record: JobRecord) -> str | None:
    """Return the array task that a selector names; None if it names the whole run.

    Raises:
        JobNotFound: the run is no array or has no such task.
    """
    task = number_in(selector, record.job_id)
    if task is None:
        return None
    if record.array is None:
        raise JobNotFound(f"job {record.job_id} has no task {task}: it is not a job array")
    if not any(int(task) in tasks for tasks in task_ranges(record.array)):
        raise JobNotFound(f"job {record.job_id} has no task {task}, only {record.array}")
    return str(int(task))


def select_task_view(view: RunView, task: str | None) -> RunView:
    """Return the view of one array task; the unchanged view if ``task`` is None."""
    if task is None:
        return view
    job_id = f"{view.record.job_id}_{task}"
    statuses = JobTable(view.statuses).belonging(job_id)
    unknown_status = JobStatus(
        job_id=job_id, state=JobState.UNKNOWN, reason="there is no record of this task"
    )
    return replace(view, statuses=tuple(statuses) or (unknown_status,))
