"""The report of a sweep's trials, from the files that they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtslurm.services.observe.telemetry import log_patterns
from dtslurm.services.wiring.context import Context
from dtslurm.worker import trial_report

PATTERNS = log_patterns(Context(cwd=Path("/"), env={}))
LOG = "step 1/3 loss 0.9\nstep 2/3 loss 0.25\nstep 3/3 loss 0.5\n"


def write_lines(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    )


def trials(run: Path, **request: Any) -> list[dict[str, Any]]:
    asked = {
        "runs": [str(run)],
        "per_task": 1,
        "metric": "loss",
        "mode": "min",
        "patterns": PATTERNS,
        **request,
    }
    [result] = trial_report.answer(asked)["runs"]
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "best"), [("min", 0.2), ("max", 0.9)])
def test_trial_report_contains_the_latest_and_best_metric(tmp_path: Path, mode: str, best: float) -> None:
    metrics = tmp_path / "tasks/3/metrics"
    write_lines(metrics / "0/train.jsonl", {"step": 1, "loss": 0.9}, {"step": 2, "loss": 0.2}, "no JSON", [1])
    write_lines(metrics / "1/train.jsonl", {"step": 3, "loss": 0.5}, {"loss": float("nan")}, {"step": 4})
    write_lines(metrics / "notes/train.jsonl", {"step": 99, "loss": 0.0})
    write_lines(tmp_path / "tasks/3/trial.json", {"values": {"lr": "1"}})
    write_lines(tmp_path / "tasks/3/stopped.json", {"step": 4})
    [result] = trials(tmp_path, mode=mode)
    assert (result["last"], result["best"], result["step"], result["stopped"]) == (0.5, best, 4, 4)
    assert (result["index"], result["task"], result["values"]) == (3, 3, {"lr": "1"})
    assert result["folder"] == str(tmp_path / "tasks/3")


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", "true", "false", "1" + "0" * 400])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_trial_report_ignores_non_finite_metrics(tmp_path: Path, value: str, mode: str) -> None:
    metrics = tmp_path / "tasks/0/metrics/0/train.jsonl"
    write_lines(metrics, {"step": 1, "loss": 0.5}, f'{{"step": {value}, "loss": {value}}}')
    [result] = trials(tmp_path, mode=mode)
    assert (result["last"], result["best"], result["step"], result["keys"]) == (0.5, 0.5, 1, [])
    write_lines(metrics, f'{{"loss": {value}}}')
    [result] = trials(tmp_path, mode=mode)
    assert (result["last"], result["best"]) == (None, None)


def test_trial_report_lists_the_written_keys_when_the_metric_is_absent(tmp_path: Path) -> None:
    write_lines(tmp_path / "tasks/0/metrics/0/train.jsonl", {"step": 1, "loss": 0.9}, {"step": 2, "lr": 1})
    [result] = trials(tmp_path, metric="acc")
    assert result["keys"] == ["step", "loss", "lr"]
    [result] = trials(tmp_path)
    assert result["keys"] == []


def test_trial_report_of_a_restarted_trial_has_no_end(tmp_path: Path) -> None:
    events = tmp_path / "tasks/0/events.jsonl"
    begun = {"event": "started", "time": 1}
    ended = {"event": "ended", "time": 5, "exit_code": 1}
    write_lines(events, begun, {"event": "staged"}, ended)
    [result] = trials(tmp_path)
    assert (result["started"], result["ended"], result["exit_code"]) == (1, 5, 1)
    write_lines(events, begun, ended, {"event": "started", "time": 9})
    [result] = trials(tmp_path)
    assert (result["started"], result["ended"], result["exit_code"]) == (9, None, None)


def test_trials_that_share_a_task_have_separate_end_records(tmp_path: Path) -> None:
    task = tmp_path / "tasks/1"
    for place in (0, 2):
        write_lines(task / f"trials/{place}/metrics/0/train.jsonl", {"step": place, "loss": 1.0})
    write_lines(task / "events.jsonl", {"event": "started", "time": 1})
    write_lines(task / "ranks/0/2.json", {"started": 2, "ended": 3, "exit_code": 9})
    write_lines(task / "ranks/1/2.json", {"started": 4, "ended": 8, "exit_code": 0})
    first, third = trials(tmp_path, per_task=3)
    assert (first["index"], first["step"], first["exit_code"], first["started"]) == (3, 0, None, 1)
    assert (third["index"], third["step"], third["exit_code"], third["ended"]) == (5, 2, 0, 8)


def test_trial_report_of_an_unstarted_sweep_is_empty(tmp_path: Path) -> None:
    assert trials(tmp_path) == []
    (tmp_path / "tasks/0").mkdir(parents=True)
    [result] = trials(tmp_path)
    assert (result["last"], result["best"], result["values"], result["started"]) == (None, None, None, None)


def test_trial_report_reads_a_metric_from_the_log(tmp_path: Path) -> None:
    write_lines(tmp_path / "tasks/0/logs/0/rank-0.log", LOG.rstrip())
    [result] = trials(tmp_path)
    assert (result["last"], result["best"], result["step"]) == (0.5, 0.25, 3)


def test_metrics_file_has_precedence_over_the_log(tmp_path: Path) -> None:
    write_lines(tmp_path / "tasks/0/logs/0/rank-0.log", LOG.rstrip())
    write_lines(tmp_path / "tasks/0/metrics/0/train.jsonl", {"step": 7, "loss": 0.7})
    [result] = trials(tmp_path)
    assert (result["last"], result["best"], result["step"]) == (0.7, 0.7, 7)


def test_trials_that_share_a_task_have_separate_logs(tmp_path: Path) -> None:
    for place, text in enumerate((LOG, "step 1/3 loss 4.0\n")):
        write_lines(tmp_path / f"tasks/0/logs/0/rank-{place}.log", text.rstrip())
        (tmp_path / f"tasks/0/trials/{place}").mkdir(parents=True)
    assert [item["best"] for item in trials(tmp_path, per_task=2)] == [0.25, 4.0]
