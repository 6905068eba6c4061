"""Values recorded on a GPU are parsed and shown in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtslurm.worker.preflight import gpus as preflight
from dtslurm.worker.sampler_nvidia import NvidiaSmi
from tests.diagnose.failures import Left, diagnose_run
from tests.gpu import results
from tests.gpu.configurations import configurations, estimate
from tests.gpu.page import page
from tests.gpu.scores import Errors, measured, ratios
from tests.gpu.ways import WAYS

RECORDED = results.read()
DATA = Path(__file__).with_name("data")


def test_recorded_nvidia_smi_row_is_parsed() -> None:
    cells = RECORDED["devices"]["rows"]["sampler"]
    row = NvidiaSmi.row(", ".join(cells[field] for field in NvidiaSmi.FIELDS))
    assert row is not None
    assert (row["name"], row["memory_total"]) == ("NVIDIA H100 80GB HBM3", 81559 << 20)
    assert (row["power_w"], row["throttle"], row["ecc_uncorrected"]) == (485.0, ["power"], 0)


def test_recorded_health_row_is_parsed() -> None:
    cells = RECORDED["devices"]["health_row"]
    result = preflight.by_table(", ".join(cells[field] for field in preflight.FIELDS), 1)
    recorded = RECORDED["devices"]["health"]["by_program"]
    # The text of the evidence may have been reworded since.
    assert [(row["check"], row["level"]) for row in result] == [
        (row["check"], row["level"]) for row in recorded
    ]


@pytest.mark.parametrize("way", [way for way in RECORDED["failures"] if way in WAYS])
def test_recorded_failure_logs_are_diagnosed(way: str, tmp_path: Path) -> None:
    """The logs are those of the recorded failures, with other paths; the summary may have been reworded."""
    logs = [path.read_text() for path in sorted(DATA.glob(f"{way}.rank-*.log"))]
    verdict = diagnose_run(tmp_path, *(Left(log, 1) for log in logs))
    assert verdict.cause == WAYS[way][0] == RECORDED["failures"][way]["told"]
    recorded_numbers, numbers = (
        sorted(re.findall(r"\d[\d.]*", text.partition(", at /")[0]))
        for text in (RECORDED["failures"][way]["summary"], verdict.summary)
    )
    assert numbers == recorded_numbers


def test_at_least_forty_configurations_can_be_planned() -> None:
    rows = configurations()
    assert len(rows) >= 40
    assert {row["precision"] for row in rows} == {"bf16", "fp32"}
    assert {row["framework"] for row in rows} == {"fsdp", "deepspeed"}
    assert all(estimate(row, "H100-80GB").memory.allocated < 76 for row in rows)


def test_planner_is_close_to_the_recorded_measurements() -> None:
    """The memory model was corrected with these rows; the step times were not."""
    rows = measured(RECORDED["planner"]["rows"])
    result = ratios(rows, RECORDED["machine"]["gpu"]["name"])
    assert Errors.of(item.memory for item in result).worst < 0.06
    assert Errors.of(item.time for item in result).median < 0.2
    text = page()
    assert text.count("| llama-") + text.count("| qwen3-") == len(rows)


def test_page_marks_values_that_were_not_measured() -> None:
    assert "Not yet measured on a GPU." in page({})
    machine = {"machine": RECORDED["machine"]}
    text = page(machine)
    assert text.count("Not yet measured on a GPU.") == 4
    assert text.count("not yet measured |") == len(WAYS)


def test_recorded_values_accumulate(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results.record("devices", "one", 1, path)
    results.record("devices", "two", {"a": 2}, path)
    results.record("devices", "one", 3, path)
    devices = results.read(path)["devices"]
    assert (devices["one"], devices["two"]) == (3, {"a": 2})
