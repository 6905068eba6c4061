"""What a job is doing right now: one small question to the machine that holds its files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from dtslurm.config import metric_patterns
from dtslurm.errors import RequestInvalid
from dtslurm.model.chunking import Rest
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.remote.answers import interpret
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import ask, far_side
from dtslurm.views import telemetry

_LIMIT_S = 60.0
PARTS = ("telemetry.failure", "telemetry.lines", "telemetry.nodes", "telemetry.log_metrics")
_POINTS = 2000  # training records that travel at once; of more, neighbours are merged


def pulse(
    context: Context,
    record: JobRecord,
    *,
    attempt: int | None = None,
    task: str | None = None,
    after: RunTelemetry | None = None,
    points: int = _POINTS,
    rest: Rest | None = None,
) -> RunTelemetry:
    """Return what a run's ranks, nodes and training are doing; the scheduler is not asked.

    Args:
        attempt: which start of the job; the newest by default. A run that has not started has none.
        task: which task of an array; by default its first one that has started.
        after: the pulse before, if there is one: only training records and events newer than its are told.
        points: at most about so many training records are told at once.
        rest: see `in_pieces`.

    Raises:
        RequestInvalid: there is no such attempt or task.
        TransportError: the files could not be read where they are.
        ProfileInvalid: a file of patterns is wrong.
    """
    if task is not None and not (task.isascii() and task.isdecimal()):
        raise RequestInvalid([f"{task!r} is no number of an array task"])
    transport, python = far_side(context, record)
    request = {
        "run_dir": record.run_dir,
        "attempt": attempt,
        "task": None if task is None else str(int(task)),
        "after": dict(after.cursor) if after is not None else None,
        "train_limit": max(1, points),
        "patterns": log_patterns(context),
    }
    answer = ask(transport, python, "telemetry.telemetry", request, timeout=_LIMIT_S, parts=PARTS)
    found = interpret(answer, lambda answer: telemetry.read(answer, after, rest), "telemetry.py")
    name = record.job_id or record.name
    if task is not None and str(int(task)) not in found.tasks:
        raise RequestInvalid([f"task {task} of {name} has not started"])
    if attempt is not None and attempt not in found.attempts:
        there = ", ".join(map(str, found.attempts))
        why = f", only {there}" if there else ": it has not started yet"
        raise RequestInvalid([f"job {name} has no attempt {attempt}{why}"])
    return found


def log_patterns(context: Context) -> list[dict[str, Any]]:
    """Return the patterns of training metrics in logs, as a worker program reads them.

    Raises:
        ProfileInvalid: a file of patterns is wrong.
    """
    return _patterns(context.cwd, context.env.get("XDG_CONFIG_HOME"), context.env.get("HOME"))


@lru_cache(maxsize=8)
def _patterns(cwd: Path, config: str | None, home: str | None) -> list[dict[str, Any]]:
    """Return the patterns as they travel; a screen that asks every few seconds reads their files once."""
    env = {"XDG_CONFIG_HOME": config or "", "HOME": home or ""}
    known = metric_patterns.load(cwd, {name: value for name, value in env.items() if value})
    return [{"words": one.words, "values": dict(one.values)} for one in known]
