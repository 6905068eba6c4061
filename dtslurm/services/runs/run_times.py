"""Start, end and duration of a run, as every command shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.presentation.quantities import duration
from dtslurm.services.runs.status import RunView
from dtslurm.slurm.parse import describe_exit


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        started, ended: seconds since the epoch on the nodes' clock, None while unknown.
        exit_code: exit code of the job script, None while unknown.
        how: text that describes how the attempt ended, or that it still runs; empty if unknown.
        script_changed: whether the training script differed from the submitted one, None while unknown.
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
        ended: when the run ended, None while it has not ended.
        paused_s: seconds between attempts, as far as the ends of the attempts are known.
        paused_since: when the last attempt ended, None while an attempt runs and once the run has ended.
    """

    started: float
    ended: float | None = None
    paused_s: float = 0.0
    paused_since: float | None = None

    def duration_s(self, now: float) -> float:
        """Return the duration in seconds, including the time between attempts."""
        return max(0.0, (now if self.ended is None else self.ended) - self.started)

    def pause_s(self, now: float) -> float:
        """Return the seconds of the duration in which no attempt ran."""
        return self.paused_s + (max(0.0, now - self.paused_since) if self.paused_since is not None else 0.0)

    def running_s(self, now: float) -> float:
        """Return the seconds of the duration in which an attempt ran."""
        return max(0.0, self.duration_s(now) - self.pause_s(now))

    def describe(self, now: float) -> str:
        """Return the duration as text, with the share in which no attempt ran."""
        pause = self.pause_s(now)
        between = f" ({duration(pause)} of it between attempts)" if pause >= 1 else ""
        return duration(self.duration_s(now)) + between


def measure_run(
    status: JobStatus, events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt] | None = None
) -> RunTimes | None:
    """Return the times of a run, or of an array task; None if it has not started or its end is not known.

    The run's events take precedence. Slurm's times are used where events are missing: the script failed
    before it recorded its start, or the job was killed before it recorded its end.

    Args:
        events: events of the run, or of the array task.
        attempts: the attempts, completed from accounting; by default those in ``events``.
    """
    attempts = attempts_of(events) if attempts is None else attempts
    start_time = min(_event_times(events, "started", "attempt"), default=status.start_time)
    if start_time is None:
        return None
    paused_s = sum(
        max(0.0, next_attempt.started - previous_attempt.ended)
        for previous_attempt, next_attempt in pairwise(attempts)
        if previous_attempt.ended is not None and next_attempt.started is not None
    )
    if status.state.ended:
        end_time = _find_end(events, status)
        return None if end_time is None else RunTimes(start_time, end_time, paused_s)
    last_end = attempts[-1].ended if attempts else None
    return None if status.state is JobState.UNKNOWN else RunTimes(start_time, None, paused_s, last_end)


def _event_times(events: Sequence[Mapping[str, Any]], *kinds: str) -> list[float]:
    times = [event.get("time") for event in events if event.get("event") in kinds]
    return [float(time) for time in times if isinstance(time, int | float)]


def _find_end(events: Sequence[Mapping[str, Any]], status: JobStatus) -> float | None:
    """Return the last recorded end after the last start, else the end according to Slurm."""
    last_start = max(_event_times(events, "started", "attempt"), default=0.0)
    end_times = [time for time in _event_times(events, "ended", "attempt_ended") if time >= int(last_start)]
    return max(end_times, default=status.end_time)


def measure_view(view: RunView, status: JobStatus) -> RunTimes | None:
    """Return the times of a run or of one of its array tasks, from the local copies of its events."""
    return measure_run(status, view.run_of(status).events())


def join_parts(parts: Sequence[RunTimes | None], *, has_ended: bool) -> RunTimes | None:
    """Return the times of an array or a sweep: from the first start of a part to the last end."""
    known_parts = [part for part in parts if part is not None]
    end_times = [part.ended for part in known_parts if part.ended is not None]
    if not known_parts or (has_ended and not end_times):
        return None
    return RunTimes(min(part.started for part in known_parts), max(end_times) if has_ended else None)


def duration_values(view: RunView, now: float) -> dict[str, dict[str, float]]:
    """Return the duration of each part of a run by job id, for JSON output, without unknown durations."""
    times_by_job = {status.job_id: measure_view(view, status) for status in view.statuses}
    return {
        job_id: {"duration_s": times.duration_s(now), "between_attempts_s": times.pause_s(now)}
        for job_id, times in times_by_job.items()
        if times is not None
    }


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Extract the attempts from a run's events; ``how`` is empty if the end was not recorded."""
    attempts: dict[int, Attempt] = {}
    for event in events:
        number, time = event.get("attempt"), event.get("time")
        if not isinstance(number, int) or not isinstance(time, int | float):
            continue
        attempt = attempts.setdefault(number, Attempt(number))
        kind = event.get("event")
        if kind in {"started", "attempt"}:
            start_time = attempt.started if attempt.started is not None else time
            nodes = fold_nodes(event.get("nodes")) or attempt.nodes
            attempts[number] = replace(attempt, started=start_time, nodes=nodes)
        elif kind == "attempt_ended" or (kind == "ended" and attempt.ended is None):
            code = event.get("exit_code")
            code = code if isinstance(code, int) else None
            description = str(event.get("summary") or describe_exit(code, None))
            attempts[number] = replace(attempt, ended=time, exit_code=code, how=description)
    return [attempts[number] for number in sorted(attempts)]
