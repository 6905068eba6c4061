"""Job ids as Slurm writes them: ``17``, ``17_3``, ``17_[1-9:2%4]``, ``12+1``."""

from __future__ import annotations

import re

_ID = re.compile(r"(\d{1,15})(?:_(\d{1,15}|\[[^\]]*\]?)|\+(\d{1,15}))?")
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?(?::(\d{1,15}))?")


def base_id(job_id: str) -> str:
    """Return the number that a whole array or heterogeneous job goes by."""
    found = _ID.match(job_id)
    return found[1] if found else job_id


def valid(job_id: str) -> bool:
    """Whether the text is a job id in a form that Slurm's commands take."""
    return _ID.fullmatch(job_id) is not None


def array_of_task(text: str) -> str:
    """Return the array whose task (``17_3``) or tasks (``17_[1-4]``) the text names, empty if none."""
    found = _ID.fullmatch(text)
    return found[1] if found and found[2] else ""


def task_ranges(expression: str) -> list[range]:
    """Read an array expression (``0-15:4%2``, ``1,3,5-7``, ``[1-3%1]``) as ranges, never expanded.

    Parts that are not understood are left out.
    """
    ranges = []
    for part in expression.strip("[] ").partition("%")[0].split(","):
        found = _RANGE.fullmatch(part.strip())
        if found:
            first = int(found[1])
            ranges.append(range(first, int(found[2] or first) + 1, int(found[3] or 1) or 1))
    return ranges


def throttle(expression: str) -> int | None:
    """Return how many tasks may run at once (``%2``), None without such a limit."""
    tail = expression.strip("[] ").partition("%")[2]
    return int(tail) if tail.isascii() and tail.isdecimal() else None


def matches_job_id(listed: str, asked: str) -> bool:
    """Whether the job that Slurm lists as ``listed`` is ``asked``, a part of it, or holds it folded in.

    ``17`` covers ``17_3`` and ``17+1``; ``17_3`` is also held by ``17_[1-9]``.
    """
    if listed == asked:
        return True
    asked_base, listed_base = base_id(asked), base_id(listed)
    if asked_base != listed_base:
        return False
    if asked == asked_base:
        return True
    task, folded = asked[len(asked_base) + 1 :], listed[len(listed_base) :]
    if folded.startswith("_[") and task.isascii() and task.isdecimal():
        return any(int(task) in tasks for tasks in task_ranges(folded[1:]))
    return False
