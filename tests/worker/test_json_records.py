"""The decoders of untrusted records: which values they accept."""

from __future__ import annotations

import ast
import json
import math
import os
import stat
from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.diagnose.findings import read
from dtslurm.diagnose.recorded import find_observed_verdict
from dtslurm.model.runs.diagnosis import JobFacts
from dtslurm.store.rundir import json_lines
from dtslurm.worker import artifacts
from dtslurm.worker.delivery.reclaim import last_start
from dtslurm.worker.lib.json_records import (
    finite_number,
    number,
    parse_lines,
    parse_object,
    read_lines,
    read_object,
    whole_number,
    write_atomically,
)
from dtslurm.worker.supervisor.hangs.signals import GpuActivity
from dtslurm.worker.telemetry import gpu_time, utilization_history
from dtslurm.worker.trial_asha import Rungs

HUGE = 10**400
DEEP = b"[" * 200_000
SEPARATORS = "a\u2028b\x85c\x0bd"


@pytest.mark.parametrize("name", ["json_records", "locks", "node_blocklist", "disk", "answer"])
def test_worker_library_parses_as_python_3_6(name: str) -> None:
    ast.parse(assets.worker(f"lib/{name}.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("value", "as_number", "as_finite", "as_whole"),
    [
        (3, 3.0, 3.0, 3),
        (-0.5, -0.5, -0.5, None),
        (2.0, 2.0, 2.0, None),  # a fraction is no index, even when it is whole
        (True, None, None, None),  # the supervisor, the pin list and `status` took True for 1
        ("7", None, None, None),
        (None, None, None, None),
        ([1], None, None, None),
        (math.inf, math.inf, None, None),
        (1e100, 1e100, None, None),  # limits of 1e9, 1e15 and none at all
        (1 << 63, float(1 << 63), float(1 << 63), None),
        (HUGE, math.inf, None, None),  # the pin list and early stopping raised OverflowError
        (-HUGE, -math.inf, None, None),
    ],
)
def test_number_decoders_accept_only_their_types(
    value: object, as_number: float | None, as_finite: float | None, as_whole: int | None
) -> None:
    assert (number(value), finite_number(value), whole_number(value)) == (as_number, as_finite, as_whole)
    assert isinstance(number(value), float | None)
    assert isinstance(finite_number(value), float | None)


def test_nan_is_accepted_by_number_but_not_by_finite_number() -> None:
    nan = json.loads("NaN")
    assert math.isnan(number(nan) or 0.0)
    assert (finite_number(nan), whole_number(nan)) == (None, None)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"3", b"null", DEEP, b"\xff", '{"a":'])
def test_parse_object_returns_an_empty_object_for_other_text(text: bytes | str) -> None:
    assert parse_object(text) == {}


def test_objects_are_read_from_a_file_and_from_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [b'{"a": "\xff"}', DEEP, b"", b"[2]", b"{}", b'{"b": 2}\r', b'{"c']
    assert list(parse_lines(lines)) == [{"a": "\ufffd"}, {"b": 2}]
    path.write_bytes(b"\n".join(lines))
    assert list(read_lines(str(path))) == [{"a": "\ufffd"}, {"b": 2}]
    assert list(read_lines(str(path), tail=14)) == [{"b": 2}]
    assert list(read_lines(str(tmp_path))) == list(read_lines(str(tmp_path / "none"))) == []
    assert read_object(str(path)) == read_object(str(tmp_path)) == {}
    path.write_text('{"a": 1}\n')
    assert read_object(os.fsencode(path)) == {"a": 1}


def test_only_a_newline_separates_json_lines(tmp_path: Path) -> None:
    """Unicode line separators are valid in JSON strings and in paths."""
    path = tmp_path / artifacts.FILE
    record = {"path": SEPARATORS}
    path.write_text(json.dumps(record, ensure_ascii=False).replace("\x0b", "\\u000b") + "\n")
    assert list(read_lines(str(path))) == list(json_lines(path)) == [record]
    assert list(artifacts.lines(str(tmp_path))) == [record]


# ---- Writing


def test_write_atomically_keeps_the_old_content_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_atomically(str(path), "a\udcff")
    assert path.read_bytes() == b"a\xff"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(str(path), "b")
    assert path.read_bytes() == b"a\xff"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    write_atomically(str(path), "c", sync=False)
    assert path.read_text() == "c"


def test_write_atomically_applies_the_umask_unless_a_mode_is_given(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(str(tmp_path / "shared"), "")
        write_atomically(str(tmp_path / "program"), "", 0o755)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"shared": 0o640, "program": 0o755}


# ---- Programs that a forged or truncated record ended


def test_early_stopping_accepts_steps_and_metrics_with_hundreds_of_digits(tmp_path: Path) -> None:
    settings = {"asha": {"step": "step", "min_steps": 1, "eta": 2}, "metric": "loss", "mode": "min"}
    rungs = Rungs(str(tmp_path), 0, settings)
    assert rungs.stops({"step": HUGE, "loss": 1.0}) is None
    assert rungs.stops({"step": True, "loss": 1.0}) is None
    assert not (tmp_path / "asha").exists()
    assert rungs.stops({"step": 1, "loss": HUGE}) is None
    assert [mark.name for mark in (tmp_path / "asha" / "0").iterdir()] == ["0=inf"]  # it ranks last


def test_checkpoint_ranking_uses_only_finite_metrics() -> None:
    rows = [
        {
            "path": str(i),
            "there": True,
            "pinned": False,
            "kind": "checkpoint",
            "step": i,
            "metrics": {"loss": loss},
        }
        for i, loss in enumerate([HUGE, 0.5, True])
    ]
    assert [row["path"] for row in artifacts.removable_checkpoints(rows, 1, "loss", False)] == ["0"]


def test_hang_detection_ignores_malformed_gpu_samples(tmp_path: Path) -> None:
    samples: list[dict[str, object]] = [
        {"time": None, "gpus": [{"index": 0, "power_w": 500.0}]},
        {"time": 100.0, "gpus": "none"},
        {"time": 101.0, "gpus": [3, {"index": [], "power_w": "500"}, {"index": 0, "power_w": 400.0}]},
        {
            "time": 1000.0,
            "gpus": [7, {"index": 0, "util": "high"}, {"index": 0, "util": 99, "power_w": 100.0}],
        },
    ]
    (tmp_path / "node-0.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert GpuActivity(str(tmp_path)).at_work(900.0, 1010.0) is False  # a quarter of its power: it waits
    (tmp_path / "node-0.jsonl").write_text('{"time": 1000.0, "gpus": [{"util": true}]}\n')
    assert GpuActivity(str(tmp_path)).at_work(900.0, 1010.0) is None


def test_last_start_reads_only_valid_records() -> None:
    lines = [b'{"event": "started", "time": 7}', b'{"event": "started", "time": "8"}', b'["started"]']
    assert last_start([*lines, b'{"event": "started", "time": 1e999}', DEEP + b'"started"']) == 7.0


def test_gpu_sums_skip_values_that_are_not_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "metrics" / "0"
    folder.mkdir(parents=True)
    gpus = [{"util": 50, "power_w": 100}, {"util": True}, {"util": HUGE}, {"util": 10, "power_w": "x"}]
    line = json.dumps({"time": 5, "gpus": gpus}) + "\n"
    (folder / "node-0.jsonl").write_text(line)
    assert gpu_time.summed(str(tmp_path)) == [2, 60.0, 0, 1, 100.0]
    [row] = utilization_history.heat(str(tmp_path), 0, 4)["rows"]
    assert row["values"] == [30.0]


def test_diagnosis_dates_events_only_by_finite_times() -> None:
    """`dtslurm diagnose` raised KeyError for a truncated event, and ValueError for the time NaN."""
    end = {
        "event": "attempt_ended",
        "attempt": 0,
        "cause": "hang",
        "summary": "no output",
        "time": math.nan,
        "rank": True,
    }
    events = [
        {"event": "signalled"},
        {"event": "cancel", "time": math.nan},
        {"event": "cancel", "time": 50},
        end,
    ]
    findings = read({"schema": 1, "events": events, "records": [], "files": [], "manifest": {}}, [], 2)
    case = FailureContext(JobFacts(over=True), findings, (), ())
    assert case.stop == 50.0
    verdict = find_observed_verdict(case)
    assert verdict is not None
    assert (verdict.cause, verdict.time, verdict.rank) == ("hang", None, None)
