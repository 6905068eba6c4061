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


def heat_of(folder: Path, records: list[Any], columns: int = 8) -> dict[str, Any]:
    write(folder, 0, records)
    return utilization_history.heat(str(folder), 0, columns)


def test_utilization_history_answers_for_the_requested_attempt(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(1000, "n1", 20), record(1001, "n1", 40)])
    request = {"run_dir": str(tmp_path), "attempt": "0", "columns": "1"}
    assert utilization_history.answer(request)["rows"][0]["values"] == [30.0]
    assert utilization_history.answer({**request, "attempt": "1"})["rows"] == []


def test_utilization_history_lists_nodes_by_number(tmp_path: Path) -> None:
    for node in (10, 2):
        write(tmp_path, node, [{**record(1000, f"n{node}", 50), "node_rank": node}])
    rows = utilization_history.heat(str(tmp_path), 0, 4)["rows"]
    assert [(row["node"], row["node_rank"]) for row in rows] == [
        ("n2", 2),
        ("n2", 2),
        ("n10", 10),
        ("n10", 10),
    ]


def test_utilization_history_lists_gpus_by_number_and_then_the_cpus(tmp_path: Path) -> None:
    gpus = [{"index": index, "util": index} for index in (10, 2, 0)]
    rows = heat_of(tmp_path, [{"time": 1000, "node": "n1", "cpu_percent": 1, "gpus": gpus}])["rows"]
    assert [row["what"] for row in rows] == ["gpu 0", "gpu 2", "gpu 10", "cpu"]


def test_utilization_history_shows_an_idle_gpu_as_zero(tmp_path: Path) -> None:
    gpu = {"index": 0, "util": 0, "memory_used": 0, "memory_total": 1, "power_w": 0}
    row, cpu = heat_of(tmp_path, [{"time": 1000, "cpu_percent": 0, "gpus": [gpu]}])["rows"]
    assert (row["values"], row["memory"], row["power_w"]) == ([0.0], 0.0, 0.0)
    assert (cpu["values"], cpu["memory"], cpu["power_w"]) == ([0.0], None, None)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"memory_used": -1, "memory_total": 80, "power_w": -1},
        {"memory_used": 20, "memory_total": 0, "power_w": None},
        {"memory_used": 20, "memory_total": -1, "power_w": float("inf")},
    ],
)
def test_utilization_history_leaves_out_what_a_gpu_does_not_report(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    silent = {"index": 1, "memory_used": 20, "memory_total": 80}
    gpus = ["?", {"index": 0, "util": 50, **values}, silent]
    (row,) = heat_of(tmp_path, [{"time": 1000, "gpus": gpus}])["rows"]
    assert (row["what"], row["values"], row["memory"], row["power_w"]) == ("gpu 0", [50.0], None, None)


def test_utilization_history_has_the_peak_memory_and_mean_power_of_a_gpu(tmp_path: Path) -> None:
    uses = [(20, 100), (60, 150), (40, 151), (40, 301)]
    gpus = [{"index": 0, "util": 5, "memory_used": used, "memory_total": 80, "power_w": watts}
            for used, watts in uses]  # fmt: skip
    (row,) = heat_of(tmp_path, [{"time": 1000 + n, "gpus": [gpu]} for n, gpu in enumerate(gpus)])["rows"]
    assert (row["memory"], row["power_w"]) == (0.75, 175.5)


def test_utilization_history_of_a_short_run_has_a_column_for_each_sample(tmp_path: Path) -> None:
    result = heat_of(tmp_path, [record(1000, "n1", 33.33), record(1060, "n1", 66.66)], columns=8)
    assert result["rows"][0]["values"] == [33.3, 66.7]


def test_utilization_history_leaves_out_impossible_times(tmp_path: Path) -> None:
    times = [0, -5, 1e11, 1000, 1001]
    result = heat_of(tmp_path, [record(time, "n1", 50) for time in times])
    assert (result["from"], result["to"], result["rows"][0]["values"]) == (1000, 1001, [50.0, 50.0])


def test_utilization_history_leaves_out_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, 1, [record(1000, "n2", 50)])
    (tmp_path / "metrics/0/node-0.jsonl").symlink_to("nowhere")
    rows = utilization_history.heat(str(tmp_path), 0, 4)["rows"]
    assert [(row["node"], row["values"]) for row in rows] == [("n2", [50.0]), ("n2", [10.0])]


@pytest.mark.parametrize(
    ("lines", "count", "read"),
    [
        (8, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, 4, [0, 3, 5, 8]),  # of the pieces, the first whole line
        (100, 4, [0, 33, 66, 99]),
        (100, 1, [0]),
    ],
)
def test_utilization_history_reads_a_long_file_at_even_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, count: int, read: list[int]
) -> None:
    monkeypatch.setattr(utilization_history, "PIECE", 128)
    path = tmp_path / "node-0.jsonl"
    path.write_text("".join(json.dumps({"time": 1000 + n}).ljust(63) + "\n" for n in range(lines)))
    records = utilization_history.records(str(path), count)
    assert [int(record["time"]) - 1000 for record in records] == read


def test_answer_is_about_the_requested_attempt(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(1000, "n1", 50)])
    request = {"run_dir": str(tmp_path), "attempt": "0", "columns": "4"}
    assert utilization_history.answer(request) == {
        "schema": 1,
        "from": 1000,
        "to": 1000,
        "rows": [
            {"node": "n1", "node_rank": 0, "what": "gpu 0", "values": [50.0], "memory": 0.25, "power_w": 300},
            {"node": "n1", "node_rank": 0, "what": "cpu", "values": [10.0], "memory": None, "power_w": None},
        ],
    }
    assert utilization_history.answer({**request, "attempt": 1})["rows"] == []


def test_nodes_and_gpus_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    gpus = [{"index": index, "util": 0} for index in (10, 9, 0)]
    for node in (10, 9):
        write(tmp_path, node, [{"time": 1000, "node": f"n{node}", "gpus": gpus, "cpu_percent": 0}])
    rows = utilization_history.heat(str(tmp_path), 0, 4)["rows"]
    assert [(row["node"], row["what"], row["values"]) for row in rows] == [
        (node, what, [0.0]) for node in ("n9", "n10") for what in ("gpu 0", "gpu 9", "gpu 10", "cpu")
    ]


def test_memory_is_the_peak_share_and_power_the_mean(tmp_path: Path) -> None:
    memory = [(10, 80), (60, 80), (0, 80), (70, 0), (-1, 80), (None, 80), (75, "x")]
    power: list[Any] = [100, 0, 200, -5, None, "x", True]
    gpus = [
        {"index": 3, "util": 50, "memory_used": used, "memory_total": total, "power_w": watts}
        for (used, total), watts in zip(memory, power, strict=True)
    ]
    samples = [{"time": 1000 + number, "gpus": [7, gpu]} for number, gpu in enumerate(gpus)]
    write(tmp_path, 0, samples)
    [row] = utilization_history.heat(str(tmp_path), 0, 1)["rows"]
    assert (row["node"], row["node_rank"], row["what"]) == ("", 0, "gpu 3")
    assert (row["values"], row["memory"], row["power_w"]) == ([50.0], 0.75, 100)


def test_columns_are_at_most_the_samples(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(1000 + number, "n1", number) for number in range(3)])
    widths = {
        columns: len(utilization_history.heat(str(tmp_path), 0, columns)["rows"][0]["values"])
        for columns in (1, 2, 3, 9)
    }
    assert widths == {1: 1, 2: 2, 3: 3, 9: 3}


def test_samples_with_an_impossible_time_or_value_are_left_out(tmp_path: Path) -> None:
    samples = [record(time, "n1", 1) for time in (-5, 0, 1e11)]
    samples += [record(1000, "n1", -1, cpu=-1), record(1001, "n1", 30, cpu=0)]
    write(tmp_path, 0, samples)
    result = utilization_history.heat(str(tmp_path), 0, 2)
    assert (result["from"], result["to"]) == (1000, 1001)
    assert [row["values"] for row in result["rows"]] == [[None, 30.0], [None, 0.0]]


def test_long_file_has_a_sample_of_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization_history, "PIECE", 100)
    lines = [json.dumps({"time": 1000 + number, "cpu_percent": number}).ljust(49) for number in range(10)]
    write(tmp_path, 0, lines)  # each is of 50 bytes
    path = str(tmp_path / "metrics" / "0" / "node-0.jsonl")
    times = {
        count: [record["time"] - 1000 for record in utilization_history.records(path, count)]
        for count in (5, 4, 3, 1)
    }
    assert times == {5: list(range(10)), 4: [0, 3, 6, 9], 3: [0, 5, 9], 1: [0]}
    assert list(utilization_history.records(str(tmp_path / "gone"), 4)) == []
