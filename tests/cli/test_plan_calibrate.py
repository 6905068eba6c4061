"""``dtslurm plan --calibrate``: a measured run changes later plans for its cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.store import codec
from tests.cli.conftest import Run

LAYOUT = ("--layout", "dp=8,mbs=1,gbs=64,zero=1,recompute=full")
PLAN = ("plan", "llama-3-8b", "--cluster", "small")


@pytest.fixture(autouse=True)
def small_cluster(folder: Path) -> None:
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "small.yaml").write_text("extends: h100x8-ib\n")


def write_run(
    folder: Path, lines: Sequence[Mapping[str, object]], cluster: str = "small", world_size: int = 8
) -> str:
    """Return the path of a run directory with these metrics."""
    path = folder / "runs" / "train-1"
    (path / "logs" / "0").mkdir(parents=True)
    (path / "metrics" / "0").mkdir(parents=True)
    (path / "metrics" / "0" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = JobRecord(
        token="abc", cluster=cluster, name="train", run_dir=str(path), phase="submitted", created_at=1.0,
        world_size=world_size,
    )  # fmt: skip
    (path / "job.json").write_bytes(codec.encode({"schema": codec.SCHEMA, **codec.plain(record)}))
    return str(path)


def predicted_step_and_memory(run: Run) -> tuple[float, float]:
    [item] = json.loads(run(*PLAN, *LAYOUT, "--json").stdout)["candidates"]
    return item["step_time_s"]["total"], item["memory_gib"]["terms"]["activations"]


def test_a_calibrated_plan_predicts_the_measured_time_and_memory(run: Run, folder: Path) -> None:
    step, activations = predicted_step_and_memory(run)
    warm_up = [{"step_time_s": 10 * step}] * 3
    steady = [{"step_time_s": 1.3 * step, "memory_gib": 60.0}] * 5
    job = write_run(folder, [*warm_up, *steady, {"loss": 2.0}])
    done = run(*PLAN, *LAYOUT, "--calibrate", job, code=0)
    assert "measured" in done.stdout
    assert "small.plan.json" in done.stderr
    assert (folder / "cluster_profiles" / "small.plan.json").is_file()
    again, kept = predicted_step_and_memory(run)
    assert again == pytest.approx(1.3 * step, rel=0.03)  # a run of a few steps moves the plan nearly as far
    assert kept != pytest.approx(activations)
    assert "computation calibrated with runs of this cluster" in run(*PLAN, *LAYOUT).stderr
    [item] = json.loads(run(*PLAN, *LAYOUT, "--json").stdout)["candidates"]
    terms = item["memory_gib"]["terms"]
    allocated = item["memory_gib"]["total"] - terms["fragmentation"] - terms["context"]
    assert allocated == pytest.approx(60.0)


def test_calibration_narrows_the_interval(run: Run, folder: Path) -> None:
    def width() -> float:
        [item] = json.loads(run(*PLAN, *LAYOUT, "--json").stdout)["candidates"]
        return float(item["step_time_s"]["high"] / item["step_time_s"]["low"])

    before = width()
    step, _ = predicted_step_and_memory(run)
    run(*PLAN, *LAYOUT, "--calibrate", write_run(folder, [{"step_time_s": 1.1 * step}]), code=0)
    assert width() < before


def test_calibrating_twice_counts_a_run_once(run: Run, folder: Path) -> None:
    step, _ = predicted_step_and_memory(run)
    job = write_run(folder, [{"step_time_s": 1.5 * step}])
    for _ in range(2):
        document = json.loads(run(*PLAN, *LAYOUT, "--calibrate", job, "--json", code=0).stdout)
        assert document["measurement"]["predicted_step_s"] == pytest.approx(step)
    kept = json.loads((folder / "cluster_profiles" / "small.plan.json").read_text())
    assert len(kept["measurements"]) == 1


def test_calibration_does_not_change_other_precisions(run: Run, folder: Path) -> None:
    step, _ = predicted_step_and_memory(run)
    before = run(*PLAN, *LAYOUT, "--precision", "fp8", "--json").stdout
    run(*PLAN, *LAYOUT, "--calibrate", write_run(folder, [{"step_time_s": 2 * step}]), code=0)
    assert run(*PLAN, *LAYOUT, "--precision", "fp8", "--json").stdout == before


def test_calibration_reports_why_a_run_cannot_be_used(run: Run, folder: Path) -> None:
    job = write_run(folder, [{"loss": 1.0}, {"step_time_s": "fast"}, {"step_time_s": -1}])
    assert "has no step_time_s" in run(*PLAN, *LAYOUT, "--calibrate", job, code=2).stderr
    assert "needs the --layout" in run(*PLAN, "--calibrate", job, code=2).stderr
    words = ("plan", "llama-3-8b", "--gpu", "H100", *LAYOUT, "--calibrate", job)
    assert "give --cluster" in run(*words, code=2).stderr
    assert "no run 'nothing' is known" in run(*PLAN, *LAYOUT, "--calibrate", "nothing", code=3).stderr
    assert not list((folder / "cluster_profiles").glob("*.json"))


def test_calibration_refuses_a_run_with_another_number_of_ranks(run: Run, folder: Path) -> None:
    job = write_run(folder, [{"step_time_s": 1.0}], world_size=16)
    stderr = run(*PLAN, *LAYOUT, "--calibrate", job, code=2).stderr
    assert "run train had 16 ranks, but --layout is for 8 GPUs" in stderr
    assert not list((folder / "cluster_profiles").glob("*.json"))


def test_calibration_limits_a_large_factor_with_a_message(run: Run, folder: Path) -> None:
    step, _ = predicted_step_and_memory(run)
    job = write_run(folder, [{"step_time_s": 9 * step}])
    assert (
        "time: the factor 9 is too large" in (done := run(*PLAN, *LAYOUT, "--calibrate", job, code=0)).stderr
    )
    assert "; 4 is used" in done.stderr


def test_calibration_refuses_a_run_of_another_cluster(run: Run, folder: Path) -> None:
    job = write_run(folder, [{"step_time_s": 1.0}], cluster="local")
    assert "was on local, not on small" in run(*PLAN, *LAYOUT, "--calibrate", job, code=2).stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"measurements": [{"job": 1}]}', '{"measurements": 7}'])
def test_a_malformed_calibration_file_is_reported(run: Run, folder: Path, text: str) -> None:
    (folder / "cluster_profiles" / "small.plan.json").write_text(text)
    done = run(*PLAN, *LAYOUT, code=2)
    assert "small.plan.json: is not a calibration file" in done.stderr
