"""The duration of a run, from its own records and from Slurm's times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.presentation.quantities import duration
from dtslurm.services.runs.run_times import RunTimes, attempts_of, duration_values, join_parts, measure_run
from dtslurm.services.runs.status import RunView

NOW = 1000.0
RUNNING = JobStatus(job_id="17", state=JobState.RUNNING, start_time=98)
ENDED = JobStatus(job_id="17", state=JobState.FAILED, start_time=500, end_time=903)
WAITING = JobStatus(job_id="17", state=JobState.PENDING)
LOST = JobStatus(job_id="17", state=JobState.UNKNOWN)


def script_event(time: float, name: str, attempt: int | None = 0) -> dict[str, Any]:
    return {"time": time, "event": name, "attempt": attempt, "exit_code": 0}


START = script_event(100, "started")
RESTARTED = [START, script_event(400, "ended"), script_event(460, "started", 1)]
SUPERVISED = [
    script_event(100, "started", None),  # the supervisor counts the attempts, once the nodes are checked
    script_event(130, "attempt"),
    script_event(400, "attempt_ended"),
    script_event(460, "attempt", 1),
]


@pytest.mark.parametrize(
    ("status", "events", "seconds", "pause"),
    [
        (RUNNING, [], 902, 0),  # the script has not recorded its start yet
        (RUNNING, [START], 900, 0),
        (RUNNING, RESTARTED, 900, 60),
        (RUNNING, SUPERVISED[:1], 900, 0),
        (RUNNING, SUPERVISED[:3], 900, 600),  # the supervisor prepares the next attempt
        (RUNNING, SUPERVISED, 900, 60),
        (WAITING, RESTARTED[:2], 900, 600),  # Slurm queued the job again
        (ENDED, RESTARTED, 803, 60),  # Slurm killed the job, which recorded no end
        (ENDED, [*RESTARTED, script_event(900, "ended", 1)], 800, 60),
        (
            ENDED,
            [*SUPERVISED, script_event(890.5, "attempt_ended", 1), script_event(890, "ended", 1)],
            790.5,
            60,
        ),
        (ENDED, [], 403, 0),
        (
            ENDED,
            [START, script_event(460, "started", 1)],
            803,
            0,
        ),  # the end of the first attempt is not known
    ],
)
def test_a_duration_lasts_from_the_first_start_to_the_end_or_now(
    status: JobStatus, events: list[dict[str, Any]], seconds: float, pause: float
) -> None:
    times = measure_run(status, events)
    assert times is not None
    assert (times.duration_s(NOW), times.pause_s(NOW)) == (seconds, pause)
    assert times.running_s(NOW) == seconds - pause


@pytest.mark.parametrize(
    ("status", "events"),
    [(WAITING, []), (LOST, RESTARTED), (JobStatus(job_id="17", state=JobState.FAILED), [START])],
)
def test_a_run_without_a_known_start_or_end_has_no_duration(
    status: JobStatus, events: list[dict[str, Any]]
) -> None:
    assert measure_run(status, events) is None


def test_attempt_end_events_end_attempts_and_the_end_event_ends_the_job() -> None:
    events = [
        {"time": 100, "event": "started", "attempt": 0, "nodes": "n[1-2]"},
        {"time": 101, "event": "attempt", "attempt": 0, "nodes": ["n1", "n2"]},
        {"time": 130, "event": "attempt_ended", "attempt": 0, "exit_code": 1},
        {"time": 135, "event": "attempt", "attempt": 1, "nodes": ["n2", "n3", "n1"]},
        {"time": 160, "event": "attempt_ended", "attempt": 1, "exit_code": 0},
        {"time": 161, "event": "ended", "attempt": 0, "exit_code": 0},
    ]
    first, second = attempts_of(events)
    assert (first.started, first.ended, first.exit_code, first.nodes) == (100, 130, 1, "n[1-2]")
    assert (second.started, second.ended, second.nodes) == (135, 160, "n[1-3]")


def test_the_time_between_attempts_is_shown_separately() -> None:
    assert RunTimes(100.0, 400.0).describe(NOW) == "5m00s"
    assert RunTimes(100.0, 400.0, paused_s=60.0).describe(NOW) == "5m00s (1m00s of it between attempts)"


def test_json_and_text_durations_are_rounded_alike(tmp_path: Path) -> None:
    record = JobRecord(
        token="t",
        cluster="c",
        name="n",
        run_dir=str(tmp_path),
        phase="submitted",
        created_at=0.0,
        job_id="17",
    )
    events = [script_event(100, "started"), script_event(107.96, "ended")]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    seconds = duration_values(RunView(record, (ENDED,)), NOW)["17"]["duration_s"]
    assert duration(seconds) == "7s"  # rounded, it would be 8s in one place and 7s in another


def test_an_array_lasts_from_the_first_start_to_the_last_end_of_its_tasks() -> None:
    parts = [RunTimes(200.0, 300.0), None, RunTimes(100.0, 150.0)]
    assert join_parts(parts, has_ended=True) == RunTimes(100.0, 300.0)
    assert join_parts([*parts, RunTimes(250.0)], has_ended=False) == RunTimes(100.0)
    assert join_parts([None], has_ended=False) is None
    assert join_parts([RunTimes(250.0)], has_ended=True) is None
