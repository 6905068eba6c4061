"""Job ids in the forms that Slurm prints: ``17``, ``17_3``, ``17_[1-9:2%4]``, ``12+1``; steps as ``17.0``."""

from __future__ import annotations

import re

_ID = re.compile(r"(\d{1,15})(?:_(\d{1,15}|\[[^\]]*\]?)|\+(\d{1,15}))?")
_STEP_ID = re.compile(r"\d{1,15}\.\d{1,15}")
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?(?::(\d{1,15}))?")


def base_id(job_id: str) -> str:
    """Return the number that all parts of an array or heterogeneous job share: 17 of ``17_3``."""
    match = _ID.match(job_id)
    return match[1] if match else job_id


def is_valid_job_id(job_id: str) -> bool:
    """Return whether the text is a job id in a form that Slurm's commands accept."""
    return _ID.fullmatch(job_id) is not None


def is_step_id(text: str) -> bool:
    """Return whether the text is the id of a numbered step of a job, such as ``17.0``."""
    return _STEP_ID.fullmatch(text) is not None


def array_of_task(text: str) -> str:
    """Return the array's id if the text names a task (``17_3``) or tasks (``17_[1-4]``), otherwise ""."""
    match = _ID.fullmatch(text)
    return match[1] if match and match[2] else ""


def task_ranges(expression: str) -> list[range]:
    """Parse an array expression (``0-15:4%2``, ``1,3,5-7``, ``[1-3%1]``) into ranges, without expansion.

    Parts that cannot be parsed are left out.
    """
    ranges = []
    for part in expression.strip("[] ").partition("%")[0].split(","):
        match = _RANGE.fullmatch(part.strip())
        if match:
            first = int(match[1])
            ranges.append(range(first, int(match[2] or first) + 1, int(match[3] or 1) or 1))
    return ranges


def parse_throttle(expression: str) -> int | None:
    """Return how many tasks may run at the same time (the ``%2`` of an array), or None for no limit."""
    limit = expression.strip("[] ").partition("%")[2]
    return int(limit) if limit.isascii() and limit.isdecimal() else None


def matches_job_id(listed_id: str, requested_id: str) -> bool:
    """Return whether the listed job is the requested one, a part of it, or a folded record with it.

    ``17`` matches ``17_3`` and ``17+1``; ``17_3`` also matches ``17_[1-9]``. A step matches only itself.

    Args:
        listed_id: the job id as Slurm lists it.
        requested_id: the requested job id.
    """
    if listed_id == requested_id:
        return True
    if is_step_id(listed_id) or is_step_id(requested_id):
        return False
    asked_base, listed_base = base_id(requested_id), base_id(listed_id)
    if asked_base != listed_base:
        return False
    if requested_id == asked_base:
        return True
    task, task_list = requested_id[len(asked_base) + 1 :], listed_id[len(listed_base) :]
    if task_list.startswith("_[") and task.isascii() and task.isdecimal():
        return any(int(task) in tasks for tasks in task_ranges(task_list[1:]))
    return False
