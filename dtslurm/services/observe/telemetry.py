"""Read the telemetry of a run with one query of the machine that holds its files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dtslurm.errors import RequestInvalid
from dtslurm.model.chunking import Rest
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.remote.answers import interpret
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import find_worker_host, query_worker
from dtslurm.views import telemetry

_LIMIT_S = 60.0
PARTS = ("lib.rank_files", "telemetry.failure", "telemetry.lines", "telemetry.nodes", "telemetry.log_metrics")
_POINTS = 2000  # training records per answer; if there are more, neighbors are merged


class RunPart(NamedTuple):
    """A part of a run.

    Attributes:
        attempt: number of the attempt; the newest by default. A run that has not started has none.
        task: index of the array task; by default the first that has started.
    """

    attempt: int | None = None
    task: str | None = None


NEWEST = RunPart()


def read_telemetry(
    context: Context,
    record: JobRecord,
    part: RunPart = NEWEST,
    *,
    previous_telemetry: RunTelemetry | None = None,
    points: int = _POINTS,
    yield_control: Rest | None = None,
) -> RunTelemetry:
    """Return the telemetry of a run's ranks, nodes and training; the scheduler is not queried.

    Args:
        previous_telemetry: the previous telemetry: only newer training records and events are returned.
        points: approximate maximum number of training records in one answer; 0 to look for none in logs.
        yield_control: see `dtslurm.model.chunking.Rest`.

    Raises:
        RequestInvalid: the attempt or task does not exist.
        TransportError: the run's files could not be read on their machine.
        ProfileInvalid: a file of metric patterns is invalid.
    """
    attempt, task = part
    if task is not None and not (task.isascii() and task.isdecimal()):
        raise RequestInvalid([f"{task!r} is not the index of an array task"])
    host = find_worker_host(context, record)
    request = {
        "run_dir": record.run_dir,
        "attempt": attempt,
        "task": None if task is None else str(int(task)),
        "after": dict(previous_telemetry.cursor) if previous_telemetry is not None else None,
        "train_limit": max(1, points),
        "patterns": log_patterns(context) if points else [],
    }
    answer = query_worker(host, "telemetry.telemetry", request, timeout=_LIMIT_S, parts=PARTS)
    current = interpret(
        answer, lambda answer: telemetry.read(answer, previous_telemetry, yield_control), "telemetry.py"
    )
    name = record.job_id or record.name
    if task is not None and str(int(task)) not in current.tasks:
        raise RequestInvalid([f"task {task} of {name} has not started"])
    if attempt is not None and attempt not in current.attempts:
        available = ", ".join(map(str, current.attempts))
        reason = f", only {available}" if available else ": the run has not started"
        raise RequestInvalid([f"job {name} has no attempt {attempt}{reason}"])
    return current


def log_patterns(context: Context) -> list[dict[str, Any]]:
    """Return the patterns of training metrics in logs, in the form that the worker program reads.

    Raises:
        ProfileInvalid: a file of metric patterns is invalid.
    """
    return _load_patterns(context.cwd, context.env.get("XDG_CONFIG_HOME"), context.env.get("HOME"))


@lru_cache(maxsize=8)
def _load_patterns(cwd: Path, config: str | None, home: str | None) -> list[dict[str, Any]]:
    """Load the patterns as JSON values; cached, because the dashboard requests them every few seconds."""
    from dtslurm.config import metric_patterns  # slow, and not for each caller

    env = {"XDG_CONFIG_HOME": config or "", "HOME": home or ""}
    patterns = metric_patterns.load(cwd, {name: value for name, value in env.items() if value})
    return [{"words": pattern.words, "values": dict(pattern.values)} for pattern in patterns]
