"""The calibration curve: errors of a cluster's rows after 1, 3 and 5 other rows calibrated the planner.

A cluster is a table's rows on one GPU with one framework and precision. The first rows are drawn at random,
several times; each drawing predicts the other rows.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.planner.folds import Residual
from benchmarks.planner.quantiles import LEVEL, rounded_up, weighted_quantile
from dtslurm.planner.calibrate import BOUNDS, part_factors
from dtslurm.planner.frameworks import FRAMEWORKS

RUNS = (0, 1, 3, 5)
DRAWINGS = 10
LEAST_LEFT = 3  # rows that remain to predict


@dataclass(frozen=True)
class CalibratedError:
    """The logarithm of measured over predicted time of a row, and the row's table."""

    source: str
    error: float


def clusters(items: Sequence[Residual]) -> list[list[Residual]]:
    """Return the rows of each cluster with enough rows for the whole curve."""
    groups: dict[tuple[str, ...], list[Residual]] = defaultdict(list)
    for item in items:
        case = item.prediction.case
        if case is not None:
            family = FRAMEWORKS[case.framework].family
            groups[item.source, case.machine.gpu.name, family, case.precision].append(item)
    return [group for group in groups.values() if len(group) >= max(RUNS) + LEAST_LEFT]


def calibrated_errors(groups: Sequence[Sequence[Residual]], runs: int) -> list[CalibratedError]:
    """Return the errors of the rows that remain after ``runs`` rows of each cluster were drawn."""
    drawn = random.Random(7)
    result: list[CalibratedError] = []
    for group in groups:
        for _ in range(DRAWINGS):
            own = drawn.sample(range(len(group)), max(RUNS))
            factors = _factors([group[index] for index in own[:runs]])
            result += [
                CalibratedError(item.source, _error(item, factors))
                for index, item in enumerate(group)
                if index not in own  # the same rows at every point of the curve
            ]
    return result


def _factors(own: Sequence[Residual]) -> dict[str, float]:
    if not own:
        return {}
    low, high = BOUNDS
    parts = [_parts(item) for item in own]
    times = [
        sum(run.values()) * min(high, max(low, math.exp(item.error)))
        for run, item in zip(parts, own, strict=True)
    ]
    return part_factors(parts, times)


def _parts(item: Residual) -> dict[str, float]:
    estimate = item.prediction.estimate
    assert estimate is not None
    return estimate.time.parts


def _error(item: Residual, factors: dict[str, float]) -> float:
    parts = _parts(item)
    scaled = sum(seconds * factors.get(part, 1.0) for part, seconds in parts.items())
    return item.error - math.log(scaled / sum(parts.values()))


def curve(items: Sequence[Residual]) -> dict[str, dict[str, Any]]:
    """Return errors by the number of a cluster's own runs: median, 90 %, mean of tables, 80 % factor."""
    groups = clusters(items)
    result: dict[str, dict[str, Any]] = {}
    for runs in RUNS:
        errors = calibrated_errors(groups, runs)
        relative = sorted(abs(math.expm1(item.error)) for item in errors)
        by_source: dict[str, list[float]] = defaultdict(list)
        for item in errors:
            by_source[item.source].append(item.error)
        pairs = [(abs(error), 1 / len(values)) for values in by_source.values() for error in values]
        means = [fmean(abs(math.expm1(value)) for value in values) for values in by_source.values()]
        result[str(runs)] = {
            "clusters": len(groups),
            "tables": len(by_source),
            "median": median(relative),
            "p90": relative[min(len(relative) - 1, int(0.9 * len(relative)))],
            "mean_of_source_means": fmean(means),
            "factor": rounded_up(math.exp(weighted_quantile(pairs, LEVEL))),
        }
    return result
