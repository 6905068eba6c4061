"""A lookup table of jobs: finds the jobs that a job id covers without a scan of all jobs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dtslurm.model.runs.state import JobStatus
from dtslurm.slurm.arrays import base_id, matches_job_id, task_ranges


class JobTable:
    """Jobs indexed by the base id of their array or heterogeneous job."""

    def __init__(self, jobs: Iterable[JobStatus]) -> None:
        self._groups: dict[str, list[JobStatus]] = defaultdict(list)
        for job in jobs:
            self._groups[base_id(job.job_id)].append(job)

    def covering(self, job_id: str) -> list[JobStatus]:
        """Return the jobs that match ``job_id``, in the given order.

        A match is the job itself, a part of it (an array task), or a folded record that contains it.
        """
        return [job for job in self._groups.get(base_id(job_id), ()) if matches_job_id(job.job_id, job_id)]

    def belonging(self, job_id: str) -> list[JobStatus]:
        """Return the jobs that `covering` finds, sorted by task number."""
        return sort_tasks(self.covering(job_id), job_id)


def sort_tasks(jobs: Sequence[JobStatus], requested_id: str) -> list[JobStatus]:
    """Sort tasks by number. If ``requested_id`` is a single task, replace the id of a folded record by it."""
    sorted_jobs = sorted(jobs, key=lambda job: [int(number) for number in re.findall(r"\d+", job.job_id)][:2])
    if requested_id != base_id(requested_id):
        return [replace(job, job_id=requested_id) if "_[" in job.job_id else job for job in sorted_jobs]
    return sorted_jobs


def select_unlisted_tasks(tasks: Sequence[JobStatus], listed_jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Return the array tasks that are absent from ``listed_jobs``, also as members of a folded record."""
    listed_ids = {job.job_id for job in listed_jobs}
    task_expressions = [job.job_id.partition("_")[2] for job in listed_jobs if "_[" in job.job_id]
    folded_ranges = [numbers for expression in task_expressions for numbers in task_ranges(expression)]
    unlisted_tasks = []
    for task in tasks:
        task_number = task.job_id.partition("_")[2]
        is_folded = (
            task_number.isascii()
            and task_number.isdecimal()
            and any(int(task_number) in numbers for numbers in folded_ranges)
        )
        if task.job_id not in listed_ids and not is_folded:
            unlisted_tasks.append(task)
    return unlisted_tasks
