"""The 80 % interval of a predicted time, from runs of laboratories that the constants were not fitted on.

``data/intervals.json`` holds, for each class of prediction, the factor that covers 80 % of the errors, and
the factor within which two layouts of one model and cluster cannot be distinguished. ``python -m
benchmarks.planner.intervals --write`` makes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from dtslurm.planner.hardware import DATA, Gpu

_WIDTH_BY_PRECISION = {"bf16": "16-bit", "fp16": "16-bit", "fp8": "8-bit", "fp4": "4-bit", "fp32": "32-bit"}


@dataclass(frozen=True)
class PredictionClass:
    """The class of a prediction, which determines the width of its interval.

    Attributes:
        seen: whether the constants were fitted to runs on this generation of chips at this precision.
        mixture: whether the model is a mixture of experts.
        assumed: whether a part of the layout was assumed.
    """

    seen: bool
    mixture: bool
    assumed: bool = False

    def __str__(self) -> str:
        """Return the key of the class in ``intervals.json``."""
        words = (
            "fitted chip" if self.seen else "new chip",
            "mixture" if self.mixture else "dense",
            "assumed layout" if self.assumed else "stated layout",
        )
        return ", ".join(words)


@dataclass(frozen=True)
class Interval:
    """An 80 % interval as a factor: a predicted time may be ``factor`` times as long, or as short."""

    factor: float

    def bounds(self, value: float) -> tuple[float, float]:
        """Return the low and the high end of the interval around a predicted value."""
        return value / self.factor, value * self.factor


def chip_cell(gpu: Gpu, precision: str) -> str:
    """Return the generation of chips and the width of numbers that a run's matrix products use."""
    return f"{gpu.variants[-1]} {_WIDTH_BY_PRECISION.get(precision, precision)}"


def classify(
    gpu: Gpu, precision: str, *, mixture: bool, assumed: bool = False, cells: Iterable[str] | None = None
) -> PredictionClass:
    """Return the class of a prediction.

    Args:
        cells: the chips and precisions that the constants were fitted to; by default those of the planner.
    """
    fitted = _table()["cells"] if cells is None else cells
    return PredictionClass(chip_cell(gpu, precision) in fitted, mixture, assumed)


def interval(kind: PredictionClass, own_runs: int = 0) -> Interval:
    """Return the interval of a class of predictions.

    Args:
        own_runs: number of runs on the same cluster that the planner was calibrated with.
    """
    factor = float(_table()["classes"][str(kind)]["factor"])
    calibrated = [
        float(entry["factor"]) for runs, entry in _table()["own_runs"].items() if 0 < int(runs) <= own_runs
    ]
    return Interval(min([factor, *calibrated]))


def tie_factor(*, mixture: bool) -> float:
    """Return the ratio of two predicted times below which measurements may reverse their order."""
    return float(_table()["pairs"]["mixture" if mixture else "dense"]["factor"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((DATA / "intervals.json").read_text("utf-8"))
    return table
