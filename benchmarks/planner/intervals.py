"""The intervals of predictions: ``python -m benchmarks.planner.intervals [--write]``.

The factor of a class is the 80 % quantile of the size of its errors, predicted without the rows' laboratory.
Tables weigh alike, because a user's runs are like one more table. A class with rows of fewer than three
laboratories takes the rows of a wider class, and the quantile is a higher one if fewer than five laboratories
have measured the rows.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

from benchmarks.planner.calibration import curve
from benchmarks.planner.fit import LinearModel, observations
from benchmarks.planner.folds import Residual, cells_without, fold_constants, held_out, residuals
from benchmarks.planner.quantiles import LEVEL, rounded_up, weighted_quantile
from benchmarks.planner.tables import rows
from dtslurm.planner import constants
from dtslurm.planner.hardware import DATA
from dtslurm.planner.intervals import PredictionClass, chip_cell
from dtslurm.planner.measured.choice import choice_groups
from dtslurm.planner.measured.evaluate import evaluate

LEAST_LABORATORIES = 3
FEW_LABORATORIES = 5  # below this number, one more laboratory may be unlike all others
CLASSES = [PredictionClass(*flags) for flags in product((True, False), (False, True), (False, True))]


def error_size(items: Sequence[Residual]) -> float:
    """Return the size of error that covers 80 % of the rows of one more table; tables weigh alike.

    With n tables of few laboratories the level is raised by 1/n of it, as in conformal prediction: one more
    table is not yet among those that the quantile was taken from.
    """
    counts = Counter(item.source for item in items)
    is_few = len({item.laboratory for item in items}) < FEW_LABORATORIES
    level = min(1.0, LEVEL * (1 + 1 / len(counts))) if is_few else LEVEL
    return weighted_quantile(((abs(item.error), 1 / counts[item.source]) for item in items), level)


def class_members(
    items: Sequence[Residual], kind: PredictionClass, least: int = LEAST_LABORATORIES
) -> list[Residual]:
    """Return the residuals of a class, or of the narrowest wider class with enough laboratories."""
    wider: tuple[Callable[[PredictionClass], bool], ...] = (
        lambda other: other == kind,
        lambda other: (other.seen, other.mixture) == (kind.seen, kind.mixture),
        lambda other: other.mixture == kind.mixture,
    )
    for belongs in wider:
        members = [item for item in items if belongs(item.kind)]
        if len({item.laboratory for item in members}) >= least:
            return members
    return list(items)


def class_factors(items: Sequence[Residual], least: int = LEAST_LABORATORIES) -> dict[str, dict[str, Any]]:
    """Return the factor of each class, with the number of rows and laboratories it rests on.

    A chip that no row was fitted to, or a layout that is partly assumed, never has a narrower interval than
    its counterpart.
    """
    result: dict[str, dict[str, Any]] = {}
    for kind in CLASSES:
        easier = [
            other
            for other in CLASSES
            if other.mixture == kind.mixture and other.seen >= kind.seen and other.assumed <= kind.assumed
        ]
        factor = max(math.exp(error_size(class_members(items, other, least))) for other in easier)
        members = class_members(items, kind, least)
        result[str(kind)] = {
            "factor": rounded_up(factor),
            "rows": len(members),
            "laboratories": len({item.laboratory for item in members}),
        }
    return result


def coverage(items: Sequence[Residual]) -> dict[str, Any]:
    """Return the share of rows within intervals that were made without the rows' laboratory."""
    inside: list[tuple[Residual, bool]] = []
    for name in {item.laboratory for item in items}:
        factors = class_factors([item for item in items if item.laboratory != name], least=2)
        inside += [
            (item, abs(item.error) <= math.log(factors[str(item.kind)]["factor"]))
            for item in items
            if item.laboratory == name
        ]
    by_source: dict[str, list[bool]] = defaultdict(list)
    by_class: dict[str, list[bool]] = defaultdict(list)
    for item, covered in inside:
        by_source[item.source].append(covered)
        by_class[str(item.kind)].append(covered)
    return {
        "rows": _share([covered for _, covered in inside]),
        "by_source": sum(map(_share, by_source.values())) / len(by_source),
        "classes": {
            name: {"rows": len(result), "covered": _share(result)} for name, result in by_class.items()
        },
    }


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


def pair_factors(items: Sequence[Residual]) -> dict[str, dict[str, Any]]:
    """Return the factor within which two layouts of one model and cluster cannot be distinguished.

    It is the 80 % quantile of the difference of their errors, of all pairs of a group. Tables weigh alike,
    and so do the groups of a table.
    """
    error_by_prediction = {id(item.prediction): item.error for item in items}
    result: dict[str, dict[str, Any]] = {}
    groups = choice_groups(item.prediction for item in items)
    count_by_source = Counter(key[0] for key in groups)
    for name, mixture in (("dense", False), ("mixture", True)):
        pairs: list[tuple[float, float]] = []
        used = 0
        for key, group in groups.items():
            if group[0].case is None or group[0].case.model.is_moe is not mixture:
                continue
            used += 1
            errors = [error_by_prediction[id(prediction)] for prediction in group]
            gaps = [abs(item - other) for item, other in combinations(errors, 2)]
            pairs += [(gap, 1 / count_by_source[key[0]] / len(gaps)) for gap in gaps]
        result[name] = {"factor": rounded_up(math.exp(weighted_quantile(pairs, LEVEL))), "groups": used}
    return result


def table(items: Sequence[Residual]) -> dict[str, Any]:
    """Return the content of ``dtslurm/planner/data/intervals.json``."""
    cells = Counter(
        (chip_cell(item.prediction.case.machine.gpu, item.prediction.case.precision), item.laboratory)
        for item in items
        if item.prediction.case is not None
    )
    return {
        "source": "errors of published runs that were predicted without their laboratory: "
        "python -m benchmarks.planner.intervals --write",
        "level": LEVEL,
        "cells": sorted(cells_without(cells, "")),
        "classes": class_factors(items),
        "pairs": pair_factors(items),
        "own_runs": {
            runs: {name: point[name] for name in ("factor", "clusters")}
            for runs, point in curve(items).items()
            if runs != "0"
        },
    }


def main() -> None:
    """Print the table, and write it with ``--write``."""
    all_rows, values = rows(), constants.default()
    model = LinearModel(observations(evaluate(all_rows, values)), values)
    items = residuals(held_out(all_rows, fold_constants(model, "laboratory"), "laboratory"))
    text = json.dumps(table(items), indent=1)
    print(text)
    print(coverage(items))
    if "--write" in sys.argv:
        (DATA / "intervals.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
