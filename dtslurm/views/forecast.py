"""When training will be done, and at which step the time limit will cut it: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from dtslurm.model.values import dataclass

_WINDOW = 50  # moments that the present pace is taken from
FEWEST_MOMENTS = 3  # with fewer, a pace says more of when was looked than of the training
_MOST_STEPS = 1e15
_LAST_MOMENT = 1e12  # seconds since the epoch; what claims to be later, or as long before it, is no time
_STALLED_S = 60.0
_STALLED_STEPS = 10  # a step that takes so many times the usual is no slow step any more


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How far a run is, and how it will go on at its present pace.

    Attributes:
        step, total: the newest step and the last one to come; ``total`` is None where nobody told it.
        pace: steps a second over the last moments, None where there are too few.
        done_at: when the last step will be done, seconds since the epoch on the job's clock.
        cut_at: the step at which the time limit ends the run, if that is before the last one.
        quiet_s: seconds since the newest step.
        stalled: whether that is far longer than steps take.
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
        """How much is done, from 0 to 1."""
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
    """Return what (time, step) points foretell, None where there is none.

    Args:
        points: in the order in which they were written; what is no number or no step is left out.
        total: number of the last step.
        now: on the clock that wrote the points.
        limit_at: when the time limit ends the run.
    """
    steps = _latest_run(points)
    if not steps:
        return None
    if total is not None and not (math.isfinite(total) and 0 < total < _MOST_STEPS):
        total = None
    time, step = steps[-1]
    pace = _pace(moments(steps)[-_WINDOW:])
    quiet = max(0.0, now - time)
    stalled = pace is not None and quiet > max(_STALLED_S, _STALLED_STEPS / pace)
    done_at = cut_at = None
    if pace is not None and total is not None and step < total:
        # While a step is overdue the end moves on with the clock.
        begin = now if stalled else time
        done_at = begin + (total - step) / pace
        if limit_at is not None and limit_at < done_at:
            cut_at = int(step + max(0.0, limit_at - begin) * pace)
    return Forecast(
        step=step, total=total, pace=pace, done_at=done_at, cut_at=cut_at, quiet_s=quiet, stalled=stalled
    )


def _latest_run(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points since training last began anew: steps go back where it restarts."""
    kept: list[tuple[float, float]] = []
    for time, step in points:
        if not (abs(time) < _LAST_MOMENT and 0 <= step < _MOST_STEPS):  # NaN is neither
            continue
        if kept and (step < kept[-1][1] or time < kept[-1][0]):  # also a clock that was set back
            kept = []
        kept.append((time, step))
    return kept


def moments(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return of points of the same time only the last one.

    Log lines that were read together have one time; between two of them no time seems to pass.
    """
    return [list(together)[-1] for _, together in groupby(points, key=itemgetter(0))]


def _pace(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < FEWEST_MOMENTS:
        return None
    (begin, first), (end, last) = points[0], points[-1]
    if end <= begin or last <= first:
        return None
    pace = (last - first) / (end - begin)
    return pace if math.isfinite(_MOST_STEPS / pace if pace else math.inf) else None
