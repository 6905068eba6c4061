"""When a run began and ended: the one definition of its duration, for every command that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dtslurm.model.node_sets import fold_nodes
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.units import duration
from dtslurm.model.values import dataclass
from dtslurm.services.runs.status import RunView
from dtslurm.slurm.parse import exit_words


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        started, ended: seconds since the epoch on the nodes' clock, None while unknown.
        exit_code: the script's own, None while unknown.
        how: how it ended, or that it goes on, in words.
        script_changed: whether it started with another script than the submitted one, None while unknown.
    """

    number: int
    nodes: str = ""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    how: str = ""
    script_changed: bool | None = None


@dataclass(frozen=True)
class RunTimes:
    """The duration of a run: from the first start of its script to its end, or to now.

    Attributes:
        started: when the script started for the first time, seconds since the epoch.
        ended: when the run ended, None while it goes on.
        paused_s: seconds between attempts, as far as the ends of the attempts are known.
        paused_since: when the last attempt ended, None while an attempt runs and once the run has ended.
    """

    started: float
    ended: float | None = None
    paused_s: float = 0.0
    paused_since: float | None = None

    def duration_s(self, now: float) -> float:
        """Return the duration in seconds, with the time between attempts."""
        return max(0.0, (now if self.ended is None else self.ended) - self.started)

    def pause_s(self, now: float) -> float:
        """Return for how many seconds of the duration no attempt ran."""
        return self.paused_s + (max(0.0, now - self.paused_since) if self.paused_since is not None else 0.0)

    def running_s(self, now: float) -> float:
        """Return for how many seconds of the duration an attempt ran."""
        return max(0.0, self.duration_s(now) - self.pause_s(now))

    def describe(self, now: float) -> str:
        """Return the duration in words, and of it the time in which no attempt ran."""
        pause = self.pause_s(now)
        between = f" ({duration(pause)} of it between attempts)" if pause >= 1 else ""
        return duration(self.duration_s(now)) + between


def measure_run(
    status: JobStatus, events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt] | None = None
) -> RunTimes | None:
    """Return the times of a run, or of an array task; None if it has not started or its end is not known.

    The run's own records count. Slurm's times count for what the run did not record: a start of a script
    that did not get as far, an end of a job that was killed.

    Args:
        events: of the run, or of the array task.
        attempts: the attempts with what accounting adds; those of the events if it adds nothing.
    """
    attempts = attempts_of(events) if attempts is None else attempts
    started = min(_times_of(events, "started", "attempt"), default=status.start_time)
    if started is None:
        return None
    paused = sum(
        max(0.0, after.started - before.ended)
        for before, after in pairwise(attempts)
        if before.ended is not None and after.started is not None
    )
    if status.state.ended:
        ended = _end_of(events, status)
        return None if ended is None else RunTimes(started, ended, paused)
    last_end = attempts[-1].ended if attempts else None
    return None if status.state is JobState.UNKNOWN else RunTimes(started, None, paused, last_end)


def _times_of(events: Sequence[Mapping[str, Any]], *kinds: str) -> list[float]:
    times = [event.get("time") for event in events if event.get("event") in kinds]
    return [float(time) for time in times if isinstance(time, int | float)]


def _end_of(events: Sequence[Mapping[str, Any]], status: JobStatus) -> float | None:
    """Return the end of the script, or else of the last attempt, if it came after the last start."""
    begun = max(_times_of(events, "started", "attempt"), default=0.0)
    ends = [time for time in _times_of(events, "ended", "attempt_ended") if time >= int(begun)]
    return max(ends, default=status.end_time)


def measure_view(view: RunView, status: JobStatus) -> RunTimes | None:
    """Return the times of a run, or of one array task of it, from the records that are on this machine."""
    return measure_run(status, view.run_of(status).events())


def join_parts(parts: Sequence[RunTimes | None], *, over: bool) -> RunTimes | None:
    """Return the times of an array or a sweep, from the first start of its parts to the last end."""
    known = [part for part in parts if part is not None]
    ends = [part.ended for part in known if part.ended is not None]
    if not known or (over and not ends):
        return None
    return RunTimes(min(part.started for part in known), max(ends) if over else None)


def duration_values(view: RunView, now: float) -> dict[str, dict[str, float]]:
    """Return by job id the duration of each part of a run, as data; a part that has none is left out."""
    known = {status.job_id: measure_view(view, status) for status in view.statuses}
    return {
        job: {"duration_s": times.duration_s(now), "between_attempts_s": times.pause_s(now)}
        for job, times in known.items()
        if times is not None
    }


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Read attempts out of a run's events; who left no word of the end has an empty ``how``."""
    found: dict[int, Attempt] = {}
    for event in events:
        number, time = event.get("attempt"), event.get("time")
        if not isinstance(number, int) or not isinstance(time, int | float):
            continue
        attempt = found.setdefault(number, Attempt(number))
        kind = event.get("event")
        if kind in {"started", "attempt"}:
            began = attempt.started if attempt.started is not None else time
            nodes = fold_nodes(event.get("nodes")) or attempt.nodes
            found[number] = replace(attempt, started=began, nodes=nodes)
        elif kind == "attempt_ended" or (kind == "ended" and attempt.ended is None):
            code = event.get("exit_code")
            code = code if isinstance(code, int) else None
            how = str(event.get("summary") or exit_words(code, None))
            found[number] = replace(attempt, ended=time, exit_code=code, how=how)
    return [found[number] for number in sorted(found)]
