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


@pytest.mark.parametrize(
    ("count", "limit", "steps"),
    [
        (0, 3, []),
        (2, 3, [1, 2]),
        (3, 3, [1, 2, 3]),
        (4, 3, [1, 3]),
        (10, 3, [1, 5, 9]),
        (10, 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (10, 0, []),
        (10, None, []),
    ],
)
def test_trial_report_has_at_most_the_requested_points(
    tmp_path: Path, count: int, limit: int | None, steps: list[int]
) -> None:
    records = [{"step": step, "loss": step / 2} for step in range(1, count + 1)]
    write_lines(tmp_path / "tasks/0/metrics/0/train.jsonl", *records)
    [result] = trials(tmp_path, **({} if limit is None else {"points": limit}))
    assert result["points"] == [[step, step / 2] for step in steps]


def test_points_without_a_step_are_numbered(tmp_path: Path) -> None:
    records = [{"loss": 3.0}, {"lr": 1}, {"loss": 2.0}, {"step": 9, "loss": 1.0}]
    write_lines(tmp_path / "tasks/0/metrics/0/train.jsonl", *records)
    [result] = trials(tmp_path, points=9)
    assert result["points"] == [[0, 3.0], [1, 2.0], [9, 1.0]]


@pytest.mark.parametrize(
    ("records", "log", "step", "keys"),
    [
        ([{"step": 7, "lr": 1}], LOG, 3, ["step", "lr"]),
        ([{"step": 7, "lr": 1}], "", 7, ["step", "lr"]),
        ([], LOG, 3, ["step", "loss"]),
        ([], "", None, []),
    ],
)
def test_step_of_a_trial_without_the_metric_is_that_of_its_log_or_else_of_its_metrics_files(
    tmp_path: Path, records: list[dict[str, int]], log: str, step: int | None, keys: list[str]
) -> None:
    write_lines(tmp_path / "tasks/0/metrics/0/train.jsonl", *records)
    write_lines(tmp_path / "tasks/0/logs/0/rank-0.log", log.rstrip())
    [result] = trials(tmp_path, metric="acc")
    assert (result["best"], result["step"]) == (None, step)
    assert [key for key in result["keys"] if key in {"step", "lr", "loss"}] == keys


def test_events_other_than_the_start_and_the_end_change_no_times(tmp_path: Path) -> None:
    others = [{"event": name, "time": 7, "exit_code": 9} for name in ("checkpoint", "finished", "term")]
    events = [{"event": "started", "time": 1}, {"event": "ended", "time": 5, "exit_code": 0}]
    write_lines(tmp_path / "tasks/0/events.jsonl", *events, *others)
    [result] = trials(tmp_path)
    assert (result["started"], result["ended"], result["exit_code"]) == (1, 5, 0)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_times_of_a_trial_that_shares_a_task_are_those_of_its_last_attempt(
    tmp_path: Path, attempts: int
) -> None:
    task = tmp_path / "tasks/0"
    (task / "trials/1").mkdir(parents=True)
    for attempt in range(attempts):
        write_lines(task / f"ranks/{attempt}/1.json", {"started": attempt, "ended": 9, "exit_code": attempt})
    [result] = trials(tmp_path, per_task=2)
    assert (result["index"], result["started"], result["exit_code"]) == (1, attempts - 1, attempts - 1)


TRACEBACK = """\
Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
    main()
ValueError: {}
"""


def write_failure(task: Path, attempt: int, rank: int, text: str) -> None:
    write_lines(task / f"logs/{attempt}/rank-{rank}.log", TRACEBACK.format(text).rstrip())


@pytest.mark.parametrize(("exit_code", "is_failure"), [(1, True), (None, True), (0, False)])
def test_failure_of_a_trial_is_that_of_its_first_failed_rank(
    tmp_path: Path, exit_code: int | None, is_failure: bool
) -> None:
    task = tmp_path / "tasks/0"
    write_failure(task, 0, 1, "of the first attempt")
    write_failure(task, 1, 1, "of the last attempt")
    write_lines(task / "ranks/1/first-failure", "1 3")
    write_lines(task / "events.jsonl", {"event": "started", "time": 1})
    if exit_code is not None:
        write_lines(task / "events.jsonl", {"event": "ended", "time": 5, "exit_code": exit_code})
    [result] = trials(tmp_path)
    expected = {
        "rank": 1, "exit_code": 3, "error": "ValueError: of the last attempt",
        "file": "/w/train.py", "line": 3,
    }  # fmt: skip
    assert result["failure"] == (expected if is_failure else None)


@pytest.mark.parametrize(("exit_code", "is_failure"), [(3, True), (None, False), (0, False)])
def test_failure_of_a_trial_that_shares_a_task_is_that_of_its_own_rank(
    tmp_path: Path, exit_code: int | None, is_failure: bool
) -> None:
    task = tmp_path / "tasks/0"
    (task / "trials/1").mkdir(parents=True)
    write_failure(task, 0, 0, "of another trial")
    write_failure(task, 0, 1, "of this trial")
    write_lines(task / "ranks/0/first-failure", "0 3")
    write_lines(task / "ranks/0/1.json", {"started": 1, "exit_code": exit_code})
    [result] = trials(tmp_path, per_task=2)
    expected = {
        "rank": 1, "exit_code": 3, "error": "ValueError: of this trial", "file": "/w/train.py", "line": 3,
    }  # fmt: skip
    assert result["failure"] == (expected if is_failure else None)


def test_trial_that_ended_without_a_log_has_no_failure(tmp_path: Path) -> None:
    write_lines(tmp_path / "tasks/0/events.jsonl", {"event": "ended", "time": 5, "exit_code": 1})
    [result] = trials(tmp_path)
    assert result["failure"] is None
