"""Training records from log lines: values, units, steps, epochs, and the log that reports the loss."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.telemetry import log_metrics
from dtslurm.worker.telemetry.log_metrics import LogParser, from_logs, patterns_of

KEYS = ("loss", "step", "total_steps", "epoch", "epoch_step", "epoch_steps", "epoch_number", "epochs",
        "step_time_ms", "step_time_s", "steps_per_s", "lr")  # fmt: skip
PATTERNS = [
    {"words": ["=", "train"], "values": {key: rf"\b{key}=<number>" for key in KEYS}},
    {"words": ["it/s"], "values": {"step": r"(\d+)/", "total_steps": r"/(\d+)"}},
]


def read(*lines: str, state: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the records of lines whose log was written at 50."""
    parser = LogParser(patterns_of(PATTERNS), {} if state is None else state)
    records: list[dict[str, Any]] = []
    for line in lines:
        parser.add(records, line, 50.0)
    assert all(record.pop("time") == 50.0 for record in records)
    if state is not None:
        state.update(parser.state)
    return records


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5), ("-1.5", -1.5), ("+.5", 0.5), ("1,234,567", 1234567), ("2e-4", 0.0002), ("1E3", 1000),
        ("1.5K", 1500), ("2M", 2e6), ("3G", 3e9), ("3B", 3e9), ("4T", 4e12), ("2s", 2), ("inf", float("inf")),
        ("2.0Meters", 2),
    ],
)  # fmt: skip
def test_numbers_of_logs_are_parsed(text: str, value: float) -> None:
    assert read(f"loss={text}") == [{"loss": value}]


@pytest.mark.parametrize(
    ("lines", "records"),
    [
        (["loss=2 step=7 total_steps=9"], [{"loss": 2, "step": 7, "total_steps": 9}]),
        (["step=7", "loss=2"], [{"step": 7, "loss": 2}]),
        (
            ["step=7 loss=3", "step=7 lr=1 loss=4", "step=8 loss=2", "step=8 loss=1"],
            [{"step": 7, "loss": 4, "lr": 1}, {"step": 8, "loss": 1}],
        ),
        (
            ["step=7 loss=3", "step=8 loss=2", "step=7 loss=4", "step=7 loss=5"],
            [{"step": 7, "loss": 3}, {"step": 8, "loss": 2}, {"step": 7, "loss": 5}],
        ),
        (["step=1000 loss=3", "step=1000 loss=4"], [{"step": 1000, "loss": 4}]),
        (["step=3", "step=4", "loss=1"], [{"step": 3}, {"step": 4, "loss": 1}]),
        (["lr=5", "step_time_s=1", "saved a checkpoint", "loss"], []),
        (
            ["epoch_number=2 epochs=4", "epoch_step=3 epoch_steps=10 loss=1"],
            [{"step": 13, "total_steps": 40, "loss": 1}],
        ),
        (["epoch_step=3 epoch_steps=10 epoch=2 loss=1"], [{"step": 23, "epoch": 2, "loss": 1}]),
        (["epoch_step=3 loss=1"], [{"step": 3, "loss": 1}]),
        (["epoch_number=2", "epoch_step=3 epoch_steps=10 loss=1"], [{"step": 13, "loss": 1}]),
        (["epoch_number=3 epochs=4", "epoch_step=3 loss=1"], [{"step": 3, "loss": 1}]),
        (["step=7.9 loss=1"], [{"step": 7, "loss": 1}]),
        (["step=inf loss=1", "loss=2"], [{"step": float("inf"), "loss": 1}, {"loss": 2}]),
        (["step=1 step_time_ms=250"], [{"step": 1, "step_time_s": 0.25}]),
        (["step=1 steps_per_s=4"], [{"step": 1, "step_time_s": 0.25}]),
        (["step=1 steps_per_s=0 step_time_s=3"], [{"step": 1, "step_time_s": 3}]),
        (
            ["5/100 [1it/s]", "3/10 [1it/s]", "6/100 [1it/s]"],  # the second bar is that of an evaluation
            [{"step": 5, "total_steps": 100}, {"step": 6, "total_steps": 100}],
        ),
        (
            ["5/100 [1it/s]", "step=6 total_steps=10 loss=1"],
            [{"step": 5, "total_steps": 100}, {"step": 6, "total_steps": 10, "loss": 1}],
        ),
        (
            ["5/100 [1it/s]", "1/100 [1it/s]", "2/200 [1it/s]"],
            [
                {"step": 5, "total_steps": 100},
                {"step": 1, "total_steps": 100},
                {"step": 2, "total_steps": 200},
            ],
        ),
    ],
)
def test_lines_become_records_of_steps(lines: list[str], records: list[dict[str, Any]]) -> None:
    assert read(*lines) == records


def test_first_pattern_that_reads_a_training_value_counts() -> None:
    assert read("lr=3 5/100 it/s") == [{"step": 5, "total_steps": 100}]
    assert read("loss=3 5/100 it/s") == [{"loss": 3}]


def test_position_of_the_previous_call_counts() -> None:
    state: dict[str, Any] = {}
    assert read("epoch_number=2 epochs=4", "step=7", state=state) == [{"step": 7}]
    assert state == {"epoch": 1, "epochs": 4, "step": 7, "loss": False}
    assert read("loss=1", state=state) == [{"loss": 1, "step": 7}]
    assert read("epoch_step=1 epoch_steps=10", state=state) == [{"step": 11, "total_steps": 40}]
    assert state == {"epoch": 1, "epochs": 4, "step": 11, "total_steps": 40, "loss": True}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2026-03-04 05:06:07 loss=1", (2026, 3, 4, 5, 6, 7)),
        ("[2026-12-31T23:59:58,123] loss=1", (2026, 12, 31, 23, 59, 58)),
        ("1926-03-04 05:06:07 loss=1", None),
        ("loss=1", None),
    ],
)
def test_time_stamp_of_a_line_is_its_time(line: str, expected: tuple[int, ...] | None) -> None:
    local = None if expected is None else time.mktime((*expected, 0, 0, -1))  # type: ignore[arg-type]
    assert log_metrics.stamp(line) == local
    parser = LogParser(patterns_of(PATTERNS), {})
    records: list[dict[str, Any]] = []
    parser.add(records, line, None)
    assert records == [{"loss": 1} if local is None else {"loss": 1, "time": local}]


def write_log(folder: Path, rank: int, text: str, written: float = 1000.06) -> None:
    path = folder / f"rank-{rank}.log"
    with path.open("a") as file:
        file.write(text)
    os.utime(path, (written, written))


def test_new_lines_of_a_log_are_read(tmp_path: Path) -> None:
    parser = LogParser(patterns_of(PATTERNS), {})
    assert LogParser(patterns_of(PATTERNS), {}).news(str(tmp_path), 0) == []
    write_log(tmp_path, 0, "step=1 loss=3\n")
    assert parser.news(str(tmp_path), 0) == [{"step": 1, "loss": 3}]
    text = "step=2 loss=1\rstep=3 loss=0\r\n" + " " * 3990 + " loss=12345678\nno value\nstep=4"
    write_log(tmp_path, 0, text)
    assert parser.news(str(tmp_path), 0) == [
        {"step": 2, "loss": 1, "time": 1000.1},
        {"step": 3, "loss": 1234, "time": 1000.1},  # the remainder of a long line is not read
    ]
    write_log(tmp_path, 0, " loss=5\n", 2000.0)
    assert parser.news(str(tmp_path), 0) == [{"step": 4, "loss": 5, "time": 2000.0}]


@pytest.mark.parametrize(
    "prefix",
    ["", "[rank0]:", "[rank12]: ", "[default0]:", "[3] ", "7: ", "7: [rank7]: ", "\x1b[1;32m", "\x1b[0m3: "],
)
def test_prefix_of_a_rank_and_colours_are_left_out(tmp_path: Path, prefix: str) -> None:
    patterns = patterns_of([{"words": ["loss"], "values": {"loss": "^loss=<number>"}}])
    write_log(tmp_path, 0, prefix + "loss=5\na: loss=9\n")
    assert LogParser(patterns, {}).news(str(tmp_path), 0) == [{"loss": 5}]


@pytest.mark.parametrize(
    ("logs", "ranks", "loss", "source"),
    [
        ({0: "loss=1\n", 3: "loss=2\n"}, [0, 3], 1, "rank-0.log"),
        ({0: "step=1\n", 3: "loss=2\n"}, [0, 1, 3, 2], 2, "rank-3.log"),
        ({0: "step=1\n", 2: "loss=2\n"}, [0, 2, 3], None, ""),
        ({0: "step=1\n"}, [], None, ""),
        ({3: "step=1\n"}, [0, 3], None, ""),
        ({}, [0, 3], None, ""),
    ],
)
def test_records_are_of_the_first_or_last_rank_that_reports_the_loss(
    tmp_path: Path, logs: dict[int, str], ranks: list[int], loss: float | None, source: str
) -> None:
    for rank, text in logs.items():
        write_log(tmp_path, rank, text)
    records, state = from_logs(str(tmp_path), PATTERNS, ranks, {})
    assert (records[-1].get("loss") if records else None, state["source"]) == (loss, source)
    assert len(records) == (1 if logs else 0)


def test_source_of_the_loss_stays_the_same(tmp_path: Path) -> None:
    write_log(tmp_path, 3, "loss=2\n")
    _, state = from_logs(str(tmp_path), PATTERNS, [0, 3], {})
    assert sorted(state["files"]) == ["rank-0.log", "rank-3.log"]
    write_log(tmp_path, 0, "loss=9\n")
    write_log(tmp_path, 3, "loss=1\n")
    records, after = from_logs(str(tmp_path), PATTERNS, [0, 3], state)
    assert records == [{"loss": 1, "time": 1000.1}]
    assert (after["source"], after["files"]["rank-3.log"]["offset"]) == ("rank-3.log", 14)
    assert state["files"]["rank-3.log"]["offset"] == 7
