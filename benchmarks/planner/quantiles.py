"""Weighted quantiles of errors, and the level of the planner's intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable

LEVEL = 0.8


def weighted_quantile(pairs: Iterable[tuple[float, float]], level: float) -> float:
    """Return the smallest value whose weight, with that of all smaller values, is the share ``level``."""
    ordered = sorted(pairs)
    wanted = level * sum(weight for _, weight in ordered)
    total = 0.0
    for value, weight in ordered:
        total += weight
        if total >= wanted:
            return value
    return ordered[-1][0]


def rounded_up(factor: float) -> float:
    """Return a factor rounded up to three decimals, so that it covers as much."""
    return math.ceil(factor * 1000) / 1000
