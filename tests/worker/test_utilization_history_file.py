from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.telemetry import utilization_history


def write(folder: Path, node: int, records: list[Any]) -> None:
    place = folder / "metrics" / "0"
    place.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    (place / f"node-{node}.jsonl").write_text("\n".join(lines) + "\n")


def record(time: float, node: str, util: float, cpu: float = 10) -> dict[str, Any]:
    gpu = {"index": 0, "util": util, "memory_used": 20, "memory_total": 80, "power_w": 300}
    return {"time": time, "node": node, "node_rank": 0, "cpu_percent": cpu, "gpus": [gpu]}


def test_utilization_history_averages_samples_into_columns(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(1000 + number, "n1", number * 10) for number in range(10)])
    write(tmp_path, 1, [record(1000, "n2", 50), record(1009, "n2", 70)])
    result = utilization_history.heat(str(tmp_path), 0, 4)
    assert (result["from"], result["to"]) == (1000, 1009)
    gpu, cpu, other, _ = result["rows"]
    assert (gpu["node"], gpu["what"], cpu["what"], other["node"]) == ("n1", "gpu 0", "cpu", "n2")
    assert gpu["values"] == [10.0, 40.0, 70.0, 90.0]
    assert (gpu["memory"], gpu["power_w"]) == (0.25, 300)
    assert other["values"] == [50.0, None, None, 70.0]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"time": "soon"}',
        '{"time": NaN, "cpu_percent": 3}',
        '{"time": 1e308}',
        '{"time": 5, "gpus": 3}',
    ],
)
def test_utilization_history_ignores_malformed_lines(tmp_path: Path, line: str) -> None:
    write(tmp_path, 0, [line, record(1000, "n1", float("nan")), record(1001, "n1", 50)])
    json.dumps(utilization_history.heat(str(tmp_path), 0, 8), allow_nan=False)


def test_utilization_history_samples_a_long_file_over_its_whole_length(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(1000 + number, "n1", number % 100) for number in range(20_000)])
    result = utilization_history.heat(str(tmp_path), 0, 8)
    assert [value is not None for value in result["rows"][0]["values"]] == [True] * 8
    assert result["to"] - result["from"] > 19_000


def test_utilization_history_without_samples_has_no_rows(tmp_path: Path) -> None:
    assert utilization_history.heat(str(tmp_path), 0, 8)["rows"] == []
