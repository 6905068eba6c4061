"""Forecast when training ends, and at which step the time limit ends it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from dtslurm.model.values import dataclass

_WINDOW = 50  # newest times from which the current pace is computed
FEWEST_MOMENTS = 3  # with fewer, the pace depends more on the times of sampling than on training
_MAX_STEP = 1e15
_MAX_TIME = 1e12  # seconds since the epoch; times with a larger absolute value are invalid
_STALLED_S = 60.0
_STALLED_STEPS = 10  # training is stalled after this many usual step durations


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The progress of a run, and a forecast at its current pace.

    Attributes:
        step, total: the newest step and the last step of the training; ``total`` is None if unknown.
        pace: steps per second over the newest points, None if there are too few points.
        done_at: the time of the last step, in seconds since the epoch on the job's clock.
        cut_at: the step at which the time limit ends the run, if it is before the last step.
        quiet_s: seconds since the newest step.
        stalled: whether ``quiet_s`` is much longer than a step usually takes.
    """

    step: float
    total: float | None = None
    pace: float | None = None
    done_at: float | None = None
    cut_at: int | None = None
    quiet_s: float = 0.0
    stalled: bool = False

    @property
    def share(self) -> float | None:
        """The completed share of the training, from 0 to 1."""
        if not self.total:
            return None
        return min(1.0, self.step / self.total)


def forecast(
    points: Sequence[tuple[float, float]],
    *,
    total: float | None = None,
    now: float,
    limit_at: float | None = None,
) -> Forecast | None:
    """Return the forecast from (time, step) points, None without a valid point.

    Args:
        points: in the order in which they were written; invalid times and steps are ignored.
        total: number of the last step.
        now: the current time on the clock that wrote the points.
        limit_at: the time at which the time limit ends the run.
    """
    steps = _points_since_restart(points)
    if not steps:
        return None
    if total is not None and not (math.isfinite(total) and 0 < total < _MAX_STEP):
        total = None
    time, step = steps[-1]
    pace = _compute_pace(moments(steps)[-_WINDOW:])
    quiet_s = max(0.0, now - time)
    is_stalled = pace is not None and quiet_s > max(_STALLED_S, _STALLED_STEPS / pace)
    done_at = cut_at = None
    if pace is not None and total is not None and step < total:
        # While a step is overdue, the forecast end moves with the clock.
        start = now if is_stalled else time
        done_at = start + (total - step) / pace
        if limit_at is not None and limit_at < done_at:
            cut_at = int(step + max(0.0, limit_at - start) * pace)
    return Forecast(
        step=step, total=total, pace=pace, done_at=done_at, cut_at=cut_at, quiet_s=quiet_s, stalled=is_stalled
    )


def _points_since_restart(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points since the last restart of training, at which the step number decreases."""
    latest_points: list[tuple[float, float]] = []
    for time, step in points:
        if not (abs(time) < _MAX_TIME and 0 <= step < _MAX_STEP):  # also skips NaN
            continue
        if latest_points and (
            step < latest_points[-1][1] or time < latest_points[-1][0]
        ):  # also if the clock was set back
            latest_points = []
        latest_points.append((time, step))
    return latest_points


def moments(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return only the last of the points that have the same time.

    Log lines that were read together get the same time, so the interval between them is zero.
    """
    return [list(same_time)[-1] for _, same_time in groupby(points, key=itemgetter(0))]


def _compute_pace(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < FEWEST_MOMENTS:
        return None
    (start, first_step), (end, last_step) = points[0], points[-1]
    if end <= start or last_step <= first_step:
        return None
    pace = (last_step - first_step) / (end - start)
    return pace if math.isfinite(_MAX_STEP / pace if pace else math.inf) else None
