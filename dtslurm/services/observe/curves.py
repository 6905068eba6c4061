"""Join the training metrics of all attempts of a run into curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import drawable

Curve = tuple[tuple[int, float], ...]


def points_of_attempts(
    context: Context, record: JobRecord, telemetry: RunTelemetry, *, max_points: int
) -> dict[int, Sequence[TrainPoint]]:
    """Return the training records of each attempt, oldest first, with one remote query per earlier attempt.

    Args:
        telemetry: telemetry of the newest attempt of the same task.
        max_points: approximate maximum number of points per attempt.

    Raises:
        TransportError: the run's files could not be read on their machine.
    """
    if telemetry.attempt is None:
        return {}
    earlier_points: dict[int, Sequence[TrainPoint]] = {
        number: read_telemetry(
            context, record, RunPart(attempt=number, task=telemetry.task), points=max_points
        ).train
        for number in sorted(telemetry.attempts)
        if number < telemetry.attempt
    }
    return {**earlier_points, telemetry.attempt: telemetry.train}


def join_attempts(attempts: Iterable[Sequence[TrainPoint]], metric: str) -> Curve:
    """Return (step, value) pairs of a metric; a later attempt's value of a step replaces an earlier one."""
    values_by_step: dict[int, float] = {}
    for number, point in enumerate(point for points in attempts for point in points):
        value = getattr(point, metric)
        if drawable(value):
            values_by_step[point.step if point.step is not None else number] = float(value)
    return tuple(sorted(values_by_step.items()))


def restart_steps(attempts: Mapping[int, Sequence[TrainPoint]]) -> dict[int, int]:
    """Return the first step of each attempt except the first attempt, if its records contain steps."""
    steps_by_attempt: dict[int, int] = {}
    for number, points in list(attempts.items())[1:]:
        first_step = next((point.step for point in points if point.step is not None), None)
        if first_step is not None:
            steps_by_attempt[number] = first_step
    return steps_by_attempt
