"""Many jobs, and what of them belongs to the one that is asked for, without a look at all the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dtslurm.model.runs.state import JobStatus
from dtslurm.slurm.arrays import base_id, matches_job_id, task_ranges


class JobTable:
    """Jobs by the number that a whole array or heterogeneous job goes by."""

    def __init__(self, jobs: Iterable[JobStatus]) -> None:
        self._groups: dict[str, list[JobStatus]] = defaultdict(list)
        for job in jobs:
            self._groups[base_id(job.job_id)].append(job)

    def covering(self, job_id: str) -> list[JobStatus]:
        """Return what is ``job_id``, a part of it, or holds it folded in, in the order that was given."""
        return [job for job in self._groups.get(base_id(job_id), ()) if matches_job_id(job.job_id, job_id)]

    def belonging(self, job_id: str) -> list[JobStatus]:
        """Return the same in the order of the tasks."""
        return in_order(self.covering(job_id), job_id)


def in_order(jobs: Sequence[JobStatus], asked: str) -> list[JobStatus]:
    """Sort tasks by number; a folded task that was asked for by itself gets its own id."""
    ordered = sorted(jobs, key=lambda job: [int(number) for number in re.findall(r"\d+", job.job_id)][:2])
    if asked != base_id(asked):
        return [replace(job, job_id=asked) if "_[" in job.job_id else job for job in ordered]
    return ordered


def unlisted(tasks: Sequence[JobStatus], listed: Sequence[JobStatus]) -> list[JobStatus]:
    """Return the tasks of an array that are not among those listed, folded ones included."""
    present = {job.job_id for job in listed}
    expressions = [job.job_id.partition("_")[2] for job in listed if "_[" in job.job_id]
    folded = [numbers for expression in expressions for numbers in task_ranges(expression)]
    found = []
    for task in tasks:
        number = task.job_id.partition("_")[2]
        inside = number.isascii() and number.isdecimal() and any(int(number) in one for one in folded)
        if task.job_id not in present and not inside:
            found.append(task)
    return found
