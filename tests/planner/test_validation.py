"""The validation of the planner: folds, priors, rows that are not scored, intervals and their coverage."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.planner import fit, intervals, tables
from benchmarks.planner.folds import Residual, cells_without, fold_constants, held_out, residuals
from benchmarks.planner.quantiles import weighted_quantile
from dtslurm.planner import constants, explain, hardware
from dtslurm.planner.intervals import PredictionClass, chip_cell, classify, interval, tie_factor
from dtslurm.planner.measured.evaluate import RowPrediction, evaluate, predict_row
from dtslurm.planner.search import search
from tests.planner.conftest import SHIPPED, training_task

ROWS = tables.rows()


def sample_rows(each: int) -> list[dict[str, str]]:
    """Return a few rows of each table."""
    by_source: dict[str, list[dict[str, str]]] = {}
    for row in ROWS:
        by_source.setdefault(row["source"], []).append(row)
    return [row for items in by_source.values() for row in items[:: max(1, len(items) // each)][:each]]


def test_every_table_has_a_described_laboratory() -> None:
    document = json.loads((tables.HERE / "sources.json").read_text("utf-8"))
    assert {row["source"] for row in ROWS} == set(document["tables"])
    assert {item["laboratory"] for item in document["tables"].values()} == set(document["laboratories"])


def test_the_name_of_a_table_or_row_changes_no_prediction() -> None:
    for row in sample_rows(2):
        named = predict_row(row, SHIPPED)
        other = predict_row({**row, "source": "x", "row_id": "y", "read_from": row["read_from"]}, SHIPPED)
        assert (named.estimate, named.reason) == (other.estimate, other.reason), row["row_id"]


def test_every_fitted_constant_has_a_prior_with_a_reason() -> None:
    fitted = {name for name, entry in constants.entries().items() if entry["source"] == fit.FITTED}
    assert fitted == set(fit.priors())
    for name, prior in fit.priors().items():
        assert len(prior["why"]) > 5, name
        assert prior["sd"] > 0
        assert ("value" in prior) != (
            "/" in name and fit.family_of(name) in constants.entries()
        ) or "value" in prior


@pytest.fixture(scope="module")
def model() -> fit.LinearModel:
    return fit.LinearModel(fit.observations(evaluate(sample_rows(6), SHIPPED)), SHIPPED)


def test_without_observations_the_constants_equal_their_priors(model: fit.LinearModel) -> None:
    known = fit.prior_constants()
    result = model.constants_at(model.solve(np.zeros(len(model.items)), longest=10))
    for name in fit.priors():
        assert result[name] == pytest.approx(known[name], rel=1e-6), name


def test_the_constants_of_a_fold_do_not_depend_on_its_left_out_rows(model: fit.LinearModel) -> None:
    before = fold_constants(model, "laboratory")["shanghai-ai-lab"]
    changed = model.truth.copy()
    changed[[item.laboratory == "shanghai-ai-lab" for item in model.items]] += 1.0
    model.truth, kept = changed, model.truth
    try:
        after = fold_constants(model, "laboratory")
    finally:
        model.truth = kept
    assert after["shanghai-ai-lab"].values == before.values
    assert after["amd"].values != fold_constants(model, "laboratory")["amd"].values


def test_a_laboratory_is_predicted_from_the_other_laboratories(model: fit.LinearModel) -> None:
    folds = fold_constants(model, "laboratory")
    rows = [row for row in ROWS if row["source"] in {"internevo", "internevo-flops"}]
    off = residuals(held_out(rows, folds, "laboratory"))
    assert len(off) == 54
    assert float(np.median([abs(item.error) for item in off])) < 0.12


def test_the_linear_model_agrees_with_the_planner_for_small_changes(model: fit.LinearModel) -> None:
    moved = {
        name: SHIPPED[name] * 1.05 for name in ("matmul/H100", "kernel_gap_us", "host_layer_us/megatron")
    }
    step = np.array([math.log(1.05) if name in moved else 0.0 for name in model.names])
    assert model.speeds(SHIPPED.but(moved)) == pytest.approx(
        model.predicted + model.jacobian @ step, abs=2e-3
    )


def test_rows_that_are_not_scored_have_a_reason() -> None:
    crawling = {**ROWS[0], "framework": "nanotron", "model": "llama-2-7b", "gpu": "H100", "gpus": "8",
                "tp": "1", "pp": "1", "cp": "1", "dp": "8", "layers": "", "hidden": "", "status": "ok",
                "tokens_per_s_per_gpu": "100", "mfu_pct": "1", "quality": "good", "notes": ""}  # fmt: skip
    result = predict_row(crawling, SHIPPED)
    assert tables.reason_not_scored(result) == "nanotron, below 5 % MFU"
    assert not tables.is_scored(result)
    assert tables.is_scored(predict_row({**crawling, "mfu_pct": "30"}, SHIPPED))
    assert tables.reason_not_scored(predict_row({**crawling, "status": "oom"}, SHIPPED)) == ""


def test_gpus_of_a_generation_share_a_cell() -> None:
    result = {name: hardware.find_gpu(name) for name in ("H100-80GB", "GH200-96", "MI355X")}
    cells = {name: chip_cell(gpu, "fp16") for name, gpu in result.items() if gpu}
    assert cells == {"H100-80GB": "H100 16-bit", "GH200-96": "H100 16-bit", "MI355X": "MI355X 16-bit"}
    counts = {("H100 16-bit", "a"): 4, ("H100 16-bit", "b"): 5, ("MI355X 16-bit", "b"): 9}
    assert cells_without(counts, "a") == {"H100 16-bit", "MI355X 16-bit"}
    assert cells_without(counts, "b") == set()


def test_intervals_are_wider_for_unknown_gpus_and_assumed_layouts() -> None:
    gpu, new = hardware.find_gpu("H100-80GB"), hardware.find_gpu("L40S")
    assert gpu is not None
    assert new is not None
    dense = classify(gpu, "bf16", mixture=False)
    assert dense.seen
    assert not classify(new, "bf16", mixture=False).seen
    factors = {kind: interval(kind).factor for kind in intervals.CLASSES}
    assert 1 < factors[dense] < 1.6
    for kind, factor in factors.items():
        assert factors[PredictionClass(False, kind.mixture, kind.assumed)] >= factor
        assert factors[PredictionClass(kind.seen, kind.mixture, True)] >= factor
    low, high = interval(dense).bounds(5.0)
    assert low < 5.0 < high
    assert tie_factor(mixture=False) > 1


def residual(source: str, laboratory: str, error: float) -> Residual:
    return Residual(RowPrediction({}), source, laboratory, PredictionClass(True, False), error)


def test_quantiles_weigh_tables_instead_of_rows() -> None:
    many = [residual("big", "a", 0.01)] * 1000
    few = [residual(f"small{number}", "b", 0.2) for number in range(20)]
    assert intervals.error_size(many) == 0.01
    assert intervals.error_size(many + few) == 0.2  # 1,000 rows of one table count as one
    assert weighted_quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 8.0)], 0.8) == 2.0


def test_quantile_is_higher_if_few_laboratories_measured_the_rows() -> None:
    errors = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert intervals.error_size([residual(str(error), str(error), error) for error in errors]) == 0.4
    assert intervals.error_size([residual(str(error), "the same", error) for error in errors]) == 0.5


def test_coverage_excludes_the_laboratory_of_the_row() -> None:
    alike = [residual(f"{name}{number}", name, 0.1) for name in "abc" for number in range(3)]
    assert intervals.coverage(alike)["rows"] == 1.0
    outlier = [residual("far", "d", 1.0)] * 3
    result = intervals.coverage(alike + outlier)
    assert result["rows"] == pytest.approx(9 / 12)
    assert result["by_source"] == pytest.approx(9 / 10)


def test_ties_are_listed_with_a_deciding_run() -> None:
    ranked = search(training_task("llama-3-8b", 2), SHIPPED).ranked
    assert explain.find_ties(ranked, 1.0) == []
    ties = explain.find_ties(ranked, 1.1)
    assert ties[0] == 2
    first = ranked[0].time.total
    assert all(1 / 1.1 < ranked[number - 1].time.total / first < 1.1 for number in ties)
    named, deciding = explain.tie_lines(ranked, ties, 1.1, 3)
    assert named.startswith("2")
    assert "cannot be distinguished from 1" in named
    assert "10 steps of each of 1, 2" in deciding
    assert explain.tie_lines(ranked, [], 1.1, 3) == []
