"""Validation: each table, or all tables of a laboratory, predicted by constants fitted to the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.planner.fit import LinearModel, Observation, full_fit, log_speeds
from benchmarks.planner.tables import is_scored, laboratory
from dtslurm.planner.constants import Constants
from dtslurm.planner.intervals import PredictionClass, chip_cell, classify
from dtslurm.planner.measured.evaluate import RowPrediction, predict_row
from dtslurm.planner.measured.rows import MeasuredRow

Scheme = Literal["source", "laboratory"]
FITTED_ROWS = 5  # a chip at a precision counts as fitted from this number of rows on


@dataclass(frozen=True)
class Residual:
    """The error of a scored row that was predicted without its laboratory.

    Attributes:
        error: logarithm of the measured divided by the predicted time.
    """

    prediction: RowPrediction
    source: str
    laboratory: str
    kind: PredictionClass
    error: float


def fold_constants(model: LinearModel, scheme: Scheme) -> dict[str, Constants]:
    """Return the constants fitted without each table or laboratory, by its name."""
    groups = [_group(item, scheme) for item in model.items]
    return {
        name: model.constants_at(model.solve(np.array([float(group != name) for group in groups])))
        for name in dict.fromkeys(groups)
    }


def _group(item: Observation, scheme: Scheme) -> str:
    return item.source if scheme == "source" else item.laboratory


def held_out(
    rows: Iterable[Mapping[str, str]], folds: Mapping[str, Constants], scheme: Scheme
) -> list[RowPrediction]:
    """Return the predictions of rows by the constants of their fold, for rows whose fold exists."""
    named = ((row["source"] if scheme == "source" else laboratory(row), row) for row in rows)
    return [predict_row(row, folds[name]) for name, row in named if name in folds]


def residuals(answers: Iterable[RowPrediction]) -> list[Residual]:
    """Return the errors of the scored rows, each with its class as its fold sees it."""
    scored = [(item, item.case, item.speed_error) for item in answers if is_scored(item)]
    rows_by_cell = Counter(
        (chip_cell(case.machine.gpu, case.precision), laboratory(item.row))
        for item, case, _ in scored
        if case is not None
    )
    return [
        Residual(
            item,
            item.row["source"],
            laboratory(item.row),
            _classify(case, cells_without(rows_by_cell, laboratory(item.row))),
            math.log(1 + error),
        )
        for item, case, error in scored
        if case is not None and error is not None
    ]


def cells_without(rows_by_cell: Mapping[tuple[str, str], int], name: str) -> set[str]:
    """Return the chips and precisions that enough rows of other laboratories have."""
    totals: Counter[str] = Counter()
    for (cell, other), count in rows_by_cell.items():
        if other != name:
            totals[cell] += count
    return {cell for cell, count in totals.items() if count >= FITTED_ROWS}


def _classify(case: MeasuredRow, cells: set[str]) -> PredictionClass:
    return classify(
        case.machine.gpu,
        case.precision,
        mixture=case.model.is_moe,
        assumed=case.assumes_layout,
        cells=cells,
    )


def linearisation_gap(model: LinearModel, name: str, linear: Constants) -> dict[str, float]:
    """Return the median error of a laboratory's rows by the linear fold and by a fold fitted in full."""
    kept = [item for item in model.items if item.laboratory != name]
    left_out = [item for item in model.items if item.laboratory == name]
    return {
        "linear": median_error(left_out, linear),
        "full": median_error(left_out, full_fit(kept, linear)),
    }


def median_error(items: Sequence[Observation], values: Constants) -> float:
    """Return the median relative error of observations under some constants."""
    speeds = [math.exp(value) for value in log_speeds(items, values)]
    return float(
        np.median([abs(speed / item.measured - 1) for speed, item in zip(speeds, items, strict=True)])
    )
