"""What Slurm did of a change where it could not do all of it, by its words about single jobs and tasks."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.scheduler.base import PartialResult
from dtslurm.scheduler.slurm_client import failure
from dtslurm.slurm.arrays import array_of_task, base_id, matches_job_id
from dtslurm.slurm.parse_errors import by_job
from dtslurm.transport.base import Completed


def partly(job_ids: Sequence[str], answer: Completed) -> PartialResult:
    """Return what was done, what waited already and what was refused.

    Raises:
        SlurmError: nothing of it was done.
    """
    told = by_job(answer.stderr)
    clear = all(one.job for one in told)  # else silence about a job may mean anything
    done = []
    for job_id in job_ids:
        about = [one for one in told if one.job and _is_about(one.job, job_id)]
        if any(one.done for one in about) or (clear and told and not about):
            done.append(job_id)
    if not done:
        raise failure(answer)
    rest = [one for one in told if not one.done]
    return PartialResult(
        tuple(done),
        waiting=tuple(one.job for one in rest if one.pending),
        refused=tuple(": ".join(filter(None, one)) for one in rest if not one.pending),
    )


def _is_about(told: str, asked: str) -> bool:
    """Whether tasks that scontrol names (``23_0-1,3``) are of the array, or the tasks, asked for."""
    array, _, tasks = told.partition("_")
    if array_of_task(asked) and "[" in asked:
        return array == base_id(asked)
    return matches_job_id(f"{array}_[{tasks}]" if tasks else array, asked)
