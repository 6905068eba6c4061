"""Calibration factors for computation, communication and host time."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner.calibration import clusters, curve
from benchmarks.planner.folds import Residual
from dtslurm.planner.calibrate import Measurement, factors, part_factors
from dtslurm.planner.intervals import PredictionClass
from dtslurm.planner.layout import parse_layout
from dtslurm.planner.measured.evaluate import RowPrediction, predict_row
from dtslurm.planner.step import PARTS, TERMS, part_of
from tests.planner.conftest import SHIPPED, estimator
from tests.planner.test_rows import ROW


def part_times(compute: float, communication: float, host: float) -> dict[str, float]:
    return {"compute": compute, "communication": communication, "host": host}


def test_every_time_term_belongs_to_a_part() -> None:
    assert {part_of(term) for term in TERMS} == set(PARTS)
    made = estimator().estimate(parse_layout("tp=2,dp=4,mbs=1,gbs=64,zero=1"))
    assert sum(made.time.parts.values()) == pytest.approx(made.time.total)


def test_one_measured_run_moves_all_parts_by_their_uncertainty() -> None:
    result = part_factors([part_times(8, 1, 1)], [13.0])
    total = sum(part_times(8, 1, 1)[part] * result[part] for part in PARTS)
    assert 12.5 < total < 13.0  # nearly what was measured, held back by the priors
    assert all(1 < result[part] < 1.6 for part in PARTS)


def test_runs_with_different_shares_separate_the_parts() -> None:
    truth = {"compute": 1.0, "communication": 2.0, "host": 0.7}
    runs = [
        part_times(10, 0.1, 0.1),
        part_times(5, 5, 0.1),
        part_times(5, 0.1, 5),
        part_times(6, 3, 1),
        part_times(3, 5, 1),
        part_times(3, 1, 4),
    ]
    times = [sum(item[part] * truth[part] for part in PARTS) for item in runs]
    result = part_factors(runs, times)
    for part in PARTS:
        assert result[part] == pytest.approx(truth[part], rel=0.06)


def test_a_run_that_agrees_with_the_plan_leaves_the_factors_at_one() -> None:
    result = part_factors([part_times(8, 1, 1), part_times(2, 3, 4)], [10.0, 9.0])
    assert result == pytest.approx(dict.fromkeys(PARTS, 1.0))


def measurement(parts: dict[str, float] | None, measured: float) -> Measurement:
    return Measurement("1", "m", "G", "fsdp", "bf16", "dp=8", 4096, 10.0, measured, 50.0, 30.0, None, parts)


def test_a_calibration_file_without_parts_scales_the_computation() -> None:
    result = factors([measurement(None, 12.0)], "G", "fsdp", "bf16")
    assert result["compute_scale"] == pytest.approx(1.2, rel=0.02)
    assert result["communication_scale"] == result["host_scale"] == pytest.approx(1.0)
    assert factors([measurement(None, 12.0)], "other", "fsdp", "bf16") == {}


def test_an_extreme_ratio_is_limited() -> None:
    result = factors([measurement(part_times(10, 0, 0), 1000.0)], "G", "fsdp", "bf16")
    assert 3.0 < result["compute_scale"] <= 4.0


def test_the_error_curve_falls_with_the_number_of_runs_of_a_uniformly_slower_cluster() -> None:
    items = []
    for index in range(12):
        row = {
            **ROW,
            "cp": "1",
            "dp": "8",
            "micro_batch": str(1 + index % 2),
            "global_batch": str(128 + 16 * index),
        }
        result: RowPrediction = predict_row(row, SHIPPED)
        items.append(Residual(result, "table", "lab", PredictionClass(True, False), math.log(1.3)))
    assert [len(group) for group in clusters(items)] == [12]
    assert clusters(items[:7]) == []
    points = curve(items)
    assert points["0"]["median"] == pytest.approx(0.3)
    assert points["1"]["median"] < 0.03
    assert points["5"]["factor"] < points["0"]["factor"]
