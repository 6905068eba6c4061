"""The history of a run from its own events: attempts, ends and failures."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs import history as service
from dtslurm.services.runs import run_evidence
from dtslurm.services.runs.history import History, history
from dtslurm.services.runs.run_evidence import (
    apply_events,
    describe_failure,
    event_folders,
    has_recorded_end,
    status_from_run_files,
)
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir

NOW = 1000.0


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    return JobRecord(
        token="t", cluster="local", name="llama", run_dir=str(tmp_path), phase="submitted", created_at=0.0,
        job_id="17",
    )  # fmt: skip


def write_events(place: Path, *events: dict[str, Any]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def start_event(time: int, attempt: int, nodes: object = "n1") -> dict[str, Any]:
    return {"time": time, "event": "started", "attempt": attempt, "nodes": nodes}


def end_event(time: int, attempt: int, code: object) -> dict[str, Any]:
    return {"time": time, "event": "ended", "attempt": attempt, "exit_code": code}


RUNNING = JobStatus(job_id="17", state=JobState.RUNNING, observed_at=900.0, start_time=100)


def read_history(record: JobRecord, status: JobStatus = RUNNING) -> History:
    return history(Context(clock=lambda: NOW), RunView(record, (status,)))


def test_an_earlier_attempt_without_a_recorded_end_is_described_as_lost(
    record: JobRecord, tmp_path: Path
) -> None:
    write_events(
        tmp_path,
        start_event(100, 0),
        start_event(300, 1, ["n1", "n2"]),
        {"event": "odd", "attempt": "x", "time": 1},
    )
    first, last = read_history(record).attempts
    assert (first.how, last.how) == ("no recorded end: preempted, requeued, or a node was lost", "running")
    assert last.nodes == "n[1-2]"


@pytest.mark.parametrize(
    ("values", "how"),
    [
        ({"state": JobState.FAILED, "exit_code": 7}, "exit code 7"),
        ({"state": JobState.TIMEOUT}, "TIMEOUT"),
        ({"state": JobState.FAILED, "signal": 9}, "ended by signal 9"),
    ],
)
def test_the_end_of_the_last_attempt_is_the_end_of_the_job(
    record: JobRecord, tmp_path: Path, values: dict[str, Any], how: str
) -> None:
    write_events(tmp_path, start_event(100, 0))
    [attempt] = read_history(record, replace(RUNNING, **values)).attempts
    assert attempt.how.startswith(how)


def test_accounting_supplies_the_end_of_an_attempt_that_recorded_none(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shared:
        def runs(self, job_id: str) -> list[JobStatus]:
            begun = [None, 95, 130, 900]
            job_status = JobStatus(
                job_id=job_id, state=JobState.PREEMPTED, raw_state="PREEMPTED", end_time=200
            )
            return [
                *(replace(job_status, start_time=time, raw_state=f"PREEMPTED at {time}") for time in begun),
                replace(job_status, job_id="18", start_time=100),
            ]

    monkeypatch.setattr(service, "SharedScheduler", Shared)
    monkeypatch.setattr(Context, "cluster_of", lambda *_: SimpleNamespace(scheduler=Shared()))
    write_events(
        tmp_path, start_event(100, 0), start_event(400, 1), end_event(500, 1, 85), start_event(600, 2)
    )
    first, second, third = read_history(record).attempts
    assert (first.how, first.ended) == ("Slurm: PREEMPTED at 95", 200)
    assert second.how.startswith("exit code 85")
    assert third.how == "running"


def test_history_does_not_query_accounting_on_the_local_scheduler(record: JobRecord, tmp_path: Path) -> None:
    write_events(tmp_path, start_event(100, 0), start_event(300, 1))
    assert read_history(record).attempts[0].how.startswith("no recorded end")
    assert read_history(replace(record, job_id=None)).attempts[0].how.startswith("no recorded end")


# ---- Where the scheduler knows nothing ----


def test_a_submission_without_an_answer_is_described_as_unknown_then_cancelled(record: JobRecord) -> None:
    unknown = replace(record, job_id=None, phase="unknown", created_at=NOW)
    [lost] = status_from_run_files(unknown, NOW)
    until = time.strftime("%H:%M:%S", time.localtime(NOW + 60))
    assert lost.state is JobState.UNKNOWN
    assert lost.reason.endswith(
        f"it is not known whether Slurm created a job; dtslurm searches for the job until {until}"
    )
    [late] = status_from_run_files(unknown, NOW + 90)
    assert late.reason.endswith("dtslurm searches for the job when the scheduler answers")
    [never] = status_from_run_files(replace(record, phase="withdrawn"), NOW)
    assert (never.state, never.source) == (JobState.CANCELLED, "record")
    assert "you can submit again" in never.reason
    assert describe_failure(RunDir(Path(record.run_dir)), never) == never.reason  # Slurm said nothing
    assert event_folders(replace(record, job_id=None)) == {}


@pytest.mark.parametrize(
    ("events", "state", "code"),
    [
        ([start_event(1, 0), end_event(2, 0, 0)], JobState.COMPLETED, 0),
        ([start_event(1, 0), end_event(2, 0, 7)], JobState.FAILED, 7),
        ([start_event(1, 0), end_event(2, 0, 0), start_event(3, 1)], JobState.UNKNOWN, None),
        ([start_event(1, 0), end_event(2, 0, "seven")], JobState.UNKNOWN, None),
        ([], JobState.UNKNOWN, None),
    ],
)
def test_only_an_end_recorded_by_the_last_attempt_ends_a_run(
    record: JobRecord, tmp_path: Path, events: list[dict[str, Any]], state: JobState, code: int | None
) -> None:
    write_events(tmp_path, *events)
    [result] = status_from_run_files(record, NOW)
    assert (result.state, result.exit_code) == (state, code)
    assert has_recorded_end(record) is (state is not JobState.UNKNOWN)
    assert ("has no record of its end" in result.reason) is (state is JobState.UNKNOWN)


def test_array_tasks_without_records_are_unknown(record: JobRecord, tmp_path: Path) -> None:
    array = replace(record, array="0-2")
    write_events(tmp_path / "tasks" / "1", end_event(2, 0, 0))
    known, rest = status_from_run_files(array, NOW)
    assert (known.job_id, known.state) == ("17_1", JobState.COMPLETED)
    assert (rest.state, rest.reason) == (JobState.UNKNOWN, "no record of the other tasks of 0-2")
    assert has_recorded_end(array, "1")
    assert not has_recorded_end(array, "2")
    for task in ("0", "2"):
        write_events(tmp_path / "tasks" / task, end_event(2, 0, 0))
    assert [item.job_id for item in status_from_run_files(array, NOW)] == ["17_0", "17_1", "17_2"]
    assert list(event_folders(array)) == ["17_0", "17_1", "17_2"]


def test_the_events_of_a_very_large_array_are_not_read(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_evidence, "_MANY_TASKS", 1)
    for task in ("0", "1"):
        write_events(tmp_path / "tasks" / task, end_event(2, 0, 0))
    assert event_folders(replace(record, array="0-1")) == {}


def test_a_recorded_start_changes_a_pending_status_to_running(tmp_path: Path) -> None:
    waiting = replace(
        RUNNING,
        state=JobState.PENDING,
        reason="Priority",
        start_time=None,
        estimated_start=990,
        time_left=600,
        observed_at=930.0,
    )
    run = RunDir(tmp_path)
    assert apply_events(waiting, None) is waiting
    write_events(tmp_path, start_event(950, 0))
    seen = apply_events(waiting, run)
    assert (seen.state, seen.start_time, seen.reason, seen.source) == (JobState.RUNNING, 950, "", "record")
    assert seen.time_left is not None
    assert seen.observed_at + seen.time_left == 950 + 600  # the limit counts from the start
    assert apply_events(RUNNING, run) is RUNNING  # that is known
    write_events(tmp_path, start_event(950, 0), end_event(960, 0, 0))
    assert apply_events(replace(RUNNING, state=JobState.UNKNOWN), run).state is JobState.UNKNOWN


def test_f66_an_end_recorded_before_the_requeue_by_a_fast_clock_is_ignored(tmp_path: Path) -> None:
    waiting = replace(RUNNING, state=JobState.PENDING, start_time=None, observed_at=990)
    write_events(tmp_path, start_event(900, 0), end_event(1060, 0, 1))
    os.utime(tmp_path / "events.jsonl", (960, 960))
    assert apply_events(waiting, RunDir(tmp_path)) is waiting
    os.utime(tmp_path / "events.jsonl", (995, 995))  # written since Slurm was asked
    assert apply_events(waiting, RunDir(tmp_path)).exit_code == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"exit_code": 7}, "exit code 7"),
        ({"signal": 9}, "signal 9"),
        ({"reason": "None"}, ""),
        ({"reason": "PartitionTimeLimit"}, "time"),
    ],
)
def test_describe_failure_gives_exit_code_signal_or_reason(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    failed = JobStatus(**{"job_id": "17", "state": JobState.FAILED, **values})
    failure = describe_failure(RunDir(tmp_path), failed)
    assert words in failure
    assert bool(failure) is bool(words)


@pytest.mark.parametrize(
    ("written", "event_names"),
    [
        ("started submitted ended", "submitted started ended"),  # the job was faster than sbatch's answer
        ("checked started attempt submitted ended", "checked submitted started attempt ended"),
        ("submitted started ended submitted started", "submitted started ended submitted started"),
        ("started ended", "started ended"),
        ("submitted", "submitted"),
        ("", ""),
    ],
)
def test_queued_first_puts_the_submission_event_before_the_start_event(
    written: str, event_names: str
) -> None:
    events = service.move_submission_first([{"event": word} for word in written.split()])
    assert [event["event"] for event in events] == event_names.split()
