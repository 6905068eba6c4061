"""Metrics of a run over all of its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.services.observe.telemetry import pulse
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import drawable

Curve = tuple[tuple[int, float], ...]


def points_of_attempts(
    context: Context, record: JobRecord, newest: RunTelemetry, *, most: int
) -> dict[int, Sequence[TrainPoint]]:
    """Return by attempt, oldest first, what a run said of its training; earlier ones are asked one by one.

    Args:
        newest: a look at the newest attempt, of the same task.
        most: about how many points there are of each at most.

    Raises:
        TransportError: the run's files could not be read where they are.
    """
    if newest.attempt is None:
        return {}
    found: dict[int, Sequence[TrainPoint]] = {
        number: pulse(context, record, attempt=number, task=newest.task, points=most).train
        for number in sorted(newest.attempts)
        if number < newest.attempt
    }
    return {**found, newest.attempt: newest.train}


def join_attempts(attempts: Iterable[Sequence[TrainPoint]], metric: str) -> Curve:
    """Return (step, value) of a metric; what an attempt trained again takes the earlier one's place."""
    found: dict[int, float] = {}
    for number, point in enumerate(point for points in attempts for point in points):
        value = getattr(point, metric)
        if drawable(value):
            found[point.step if point.step is not None else number] = float(value)
    return tuple(sorted(found.items()))


def restart_steps(attempts: Mapping[int, Sequence[TrainPoint]]) -> dict[int, int]:
    """Return the step at which each attempt but the first began, where it told steps."""
    found: dict[int, int] = {}
    for number, points in list(attempts.items())[1:]:
        first = next((point.step for point in points if point.step is not None), None)
        if first is not None:
            found[number] = first
    return found
