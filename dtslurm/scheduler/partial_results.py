"""The result of a change that Slurm made for some jobs only, from its messages on each job or task."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.scheduler.base import PartialResult
from dtslurm.scheduler.slurm_client import failure
from dtslurm.slurm.arrays import array_of_task, base_id, matches_job_id
from dtslurm.slurm.parse_errors import split_by_job
from dtslurm.transport.base import Completed


def parse_partial_result(job_ids: Sequence[str], answer: Completed) -> PartialResult:
    """Return the jobs for which the change was made, those already pending, and the refusals.

    Raises:
        SlurmError: the change was made for no job.
    """
    answers = split_by_job(answer.stderr)
    # If a message names no job, a job without a message may have been changed or not.
    all_name_a_job = all(line.job for line in answers)
    changed_ids = []
    for job_id in job_ids:
        job_answers = [line for line in answers if line.job and _is_about(line.job, job_id)]
        if any(line.done for line in job_answers) or (all_name_a_job and answers and not job_answers):
            changed_ids.append(job_id)
    if not changed_ids:
        raise failure(answer)
    unchanged_lines = [line for line in answers if not line.done]
    return PartialResult(
        tuple(changed_ids),
        waiting=tuple(line.job for line in unchanged_lines if line.pending),
        refused=tuple(": ".join(filter(None, line)) for line in unchanged_lines if not line.pending),
    )


def _is_about(listed_id: str, requested_id: str) -> bool:
    """Return whether a message of scontrol (``23_0-1,3: ...``) is about the requested job, array or tasks.

    Args:
        listed_id: the job or tasks that the message names, such as ``23_0-1,3``.
        requested_id: the requested id.
    """
    array, _, tasks = listed_id.partition("_")
    if array_of_task(requested_id) and "[" in requested_id:
        return array == base_id(requested_id)
    return matches_job_id(f"{array}_[{tasks}]" if tasks else array, requested_id)
