"""Which runs on another machine are asked for their own records when their state is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs.monitor import QueueSnapshot
from dtslurm.services.runs.status import _has_more_to_say
from dtslurm.services.wiring.context import Context

RUNNING = JobStatus(job_id="7", state=JobState.RUNNING, start_time=100)
DONE = JobStatus(
    job_id="7", state=JobState.COMPLETED, exit_code=0, start_time=100, end_time=120, observed_at=130.0
)


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    return JobRecord(
        token="a" * 12,
        script_hash="b" * 16,
        cluster="far",
        name="train",
        run_dir="/far/run",
        mirror=str(mirror),
        job_id="7",
        phase="submitted",
        created_at=90.0,
    )


def tell(record: JobRecord, *events: tuple[str, int]) -> None:
    lines = [json.dumps({"time": time, "event": event, "exit_code": 0}) for event, time in events]
    (Path(record.mirror) / "events.jsonl").write_text("\n".join(lines) + "\n")


def asks(record: JobRecord, *seen: JobStatus) -> bool:
    return _has_more_to_say(record, QueueSnapshot({"7": list(seen)}, 130.0))


def test_what_has_not_ended_is_not_asked(record: JobRecord) -> None:
    assert not asks(record, RUNNING)


def test_what_nobody_knows_is_asked(record: JobRecord) -> None:
    assert asks(record)
    assert asks(record, replace(RUNNING, state=JobState.UNKNOWN))


def test_an_end_is_asked_for_until_the_run_itself_has_told_of_it(record: JobRecord) -> None:
    assert asks(record, DONE)
    tell(record, ("started", 100))
    assert asks(replace(record, final=(DONE,)), DONE)
    tell(record, ("started", 100), ("ended", 119))
    assert not asks(replace(record, final=(DONE,)), DONE)


def test_a_second_run_of_the_job_is_asked_for_its_own_end(record: JobRecord) -> None:
    tell(record, ("started", 100), ("ended", 119))
    again = replace(DONE, state=JobState.FAILED, start_time=200, end_time=220)
    assert asks(replace(record, final=(DONE,)), again)


def test_an_end_seen_once_more_is_not_written_once_more(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtslurm.services.runs import status

    saved: list[object] = []
    monkeypatch.setattr(status, "save", lambda _, ended: saved.append(ended))
    context = Context()
    first = status._view(context, record, QueueSnapshot({"7": [DONE]}, 130.0)).record
    later = QueueSnapshot({"7": [replace(DONE, observed_at=140.0)]}, 140.0)
    status._view(context, first, later)
    assert len(saved) == 1
    status._view(context, first, QueueSnapshot({"7": [replace(DONE, exit_code=1)]}, 140.0))
    assert len(saved) == 2
