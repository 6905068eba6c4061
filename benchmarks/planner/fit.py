"""Fit the planner's constants to all published runs: ``python -m benchmarks.planner.fit [--write]``.

The logarithm of the speed is fitted by damped Gauss-Newton steps with a soft-L1 loss, so that rows which are
far off pull little. ``priors.json`` holds each constant near a value that data sheets and kernels suggest,
independent of the rows; a variant (``matmul/H100``) is held near its family (``matmul``). A table of n rows
counts as n to the power of 0.4 independent rows, because the errors of a table are alike.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from benchmarks.planner.tables import HERE, is_scored, laboratory, rows
from dtslurm.planner import constants
from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import DATA
from dtslurm.planner.measured.evaluate import RowPrediction, by_source, evaluate, measured_tokens_per_s
from dtslurm.planner.measured.rows import MeasuredRow

FITTED = "fitted on published runs (benchmarks/planner/fit.py)"
MOST_ROWS, NOISE, STEP = 60, 0.05, 0.05
LONGEST_MOVE = 0.5  # of the logarithm of a constant in one step
Vector: TypeAlias = Any  # an array of floats; the type check runs without numpy
SHARES = (
    "tp_overlap",
    "dp_overlap",
    "ep_overlap",
    "pp_exposed",
    "all_to_all_efficiency",
    "matmul",
    "nic_efficiency",
    "hbm_efficiency",
)  # never above 0.98


@dataclass(frozen=True)
class Observation:
    """A measured speed to fit to: tokens per second and GPU."""

    case: MeasuredRow
    measured: float
    source: str
    laboratory: str
    weight: float


@cache
def priors() -> dict[str, dict[str, Any]]:
    """Return the prior of each fitted constant."""
    document: dict[str, dict[str, Any]] = json.loads((HERE / "priors.json").read_text("utf-8"))
    return document


def prior_constants() -> Constants:
    """Return the constants as known before any row was seen: prior values in place of fitted ones."""
    values = {name: float(prior["value"]) for name, prior in priors().items() if "value" in prior}
    default = constants.default().but(values)
    for name, prior in priors().items():  # families come before their variants
        if "value" not in prior:
            values[name] = values.get(family_of(name), default[family_of(name)])
    return default.but(values)


def family_of(name: str) -> str:
    """Return the constant that a variant is held near: its ``family``, else the name before the slash."""
    return str(priors()[name].get("family") or name.partition("/")[0])


def observations(answers: Iterable[RowPrediction]) -> list[Observation]:
    """Return the rows to fit to, at most 60 of each table, the same ones every time."""
    picked = random.Random(3)
    result: list[Observation] = []
    for source, items in by_source([item for item in answers if is_scored(item)]).items():
        some = picked.sample(items, min(len(items), MOST_ROWS))
        for item in some:
            measured = measured_tokens_per_s(item)
            if item.case is not None and measured is not None:
                place = (source, laboratory(item.row), len(some) ** -0.3)
                result.append(Observation(item.case, measured, *place))
    return result


def log_speed(case: MeasuredRow, values: Constants) -> float:
    """Return the logarithm of the predicted tokens per second and GPU."""
    layout = case.layout
    seconds = case.estimator(values).timer.step(layout).total
    return math.log(layout.gbs * case.seq_len / seconds / layout.gpus)


def log_speeds(items: Iterable[Observation], values: Constants) -> list[float]:
    """Return the predicted log speeds of observations."""
    return [log_speed(item.case, values) for item in items]


class LinearModel:
    """The predicted log speeds of observations, linear in the logarithms of the constants around a point."""

    def __init__(self, items: Sequence[Observation], around: Constants) -> None:
        self.items = items
        self.names = list(priors())
        self.start: Vector = np.log([around[name] for name in self.names])
        self.base = around
        self.truth: Vector = np.log([item.measured for item in items])
        self.predicted = self.speeds(around)
        columns = []
        for name in self.names:
            moved = around.but({name: around[name] * math.exp(STEP)})
            columns.append((self.speeds(moved) - self.predicted) / STEP)
        self.jacobian: Vector = np.stack(columns, axis=1)

    def speeds(self, values: Constants) -> Vector:
        """Return the predicted log speeds under some constants, without linearisation."""
        return np.array(log_speeds(self.items, values))

    def constants_at(self, point: Vector) -> Constants:
        """Return the constants at a point."""
        pairs = zip(self.names, point, strict=True)
        return self.base.but({name: math.exp(float(value)) for name, value in pairs})

    def solve(self, keep: Vector, *, longest: float = 2.0, rounds: int = 20) -> Vector:
        """Return the point that minimises the soft-L1 loss of the kept observations plus the priors.

        Args:
            keep: 1 for each observation to fit to, 0 for the others.
            longest: largest change of a logarithm.
            rounds: number of reweighted least-squares steps.
        """
        matrix, target = _prior_rows(self.names)
        weights = np.array([item.weight for item in self.items]) * keep / NOISE
        most = np.minimum(self.start + longest, [_upper_bound(name) for name in self.names])
        least = self.start - longest
        point = self.start.copy()
        for _ in range(rounds):
            misses = weights * (self.predicted + self.jacobian @ (point - self.start) - self.truth)
            scale = weights * (1 + misses**2) ** -0.25  # the root of soft L1's weight
            left = np.concatenate([scale[:, None] * self.jacobian, matrix])
            right = np.concatenate(
                [scale * (self.truth - self.predicted + self.jacobian @ self.start), target]
            )
            updated = _bounded_least_squares(left, right, least, most)
            if np.max(np.abs(updated - point)) < 1e-4:
                return updated
            point = updated
        return point


def _upper_bound(name: str) -> float:
    return math.log(0.98) if name.split("/", maxsplit=1)[0] in SHARES else math.inf


def _prior_rows(names: Sequence[str]) -> tuple[Vector, Vector]:
    """Return the priors as rows of a least-squares problem: x = value, or x = family."""
    index = {name: number for number, name in enumerate(names)}
    matrix, target = np.zeros((len(names), len(names))), np.zeros(len(names))
    for name, number in index.items():
        prior = priors()[name]
        room = float(prior["sd"])
        matrix[number, number] = 1 / room
        family = family_of(name)
        if "value" in prior:
            target[number] = math.log(float(prior["value"])) / room
        elif family in index:
            matrix[number, index[family]] = -1 / room
        else:
            target[number] = math.log(constants.default()[family]) / room
    return matrix, target


def _bounded_least_squares(left: Vector, right: Vector, least: Vector, most: Vector) -> Vector:
    """Solve least squares; variables beyond a bound are set to it, and the others are solved again.

    The normal equations are well conditioned, because every variable has a prior.
    """
    square, product = left.T @ left, left.T @ right
    point: Vector = np.clip(np.linalg.solve(square, product), least, most)
    for _ in range(5):
        free = (point > least) & (point < most)
        rest = product[free] - square[np.ix_(free, ~free)] @ point[~free]
        solved = np.linalg.solve(square[np.ix_(free, free)], rest)
        clipped = np.clip(solved, least[free], most[free])
        point[free] = clipped
        if np.array_equal(solved, clipped):
            break
    return point


def full_fit(items: Sequence[Observation], start: Constants, steps: int = 6) -> Constants:
    """Return the constants fitted with a new linearisation at every step."""
    values = start
    for _ in range(steps):
        model = LinearModel(items, values)
        point = model.solve(np.ones(len(items)), longest=LONGEST_MOVE)
        values = model.constants_at(point)
        if np.max(np.abs(point - model.start)) < 0.01:
            break
    return values


def write_constants(values: Mapping[str, float]) -> None:
    """Write fitted values to ``constants.json``."""
    document = {name: dict(entry) for name, entry in constants.entries().items()}
    for name, value in values.items():
        document[name] = {"value": float(f"{value:.3g}"), "source": FITTED}
    (DATA / "constants.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def main() -> None:
    """Fit, print prior, old and new values, and write them with ``--write``."""
    before, known = constants.default(), prior_constants()
    items = observations(evaluate(rows(), before))
    after = full_fit(items, known)
    for name in priors():
        print(f"{name:<44}{known[name]:>10.4g}{before[name]:>10.4g} -> {after[name]:.4g}")
    print(f"{len(items)} rows")
    if "--write" in sys.argv:
        write_constants({name: after[name] for name in priors()})


if __name__ == "__main__":
    main()
