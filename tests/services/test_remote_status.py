"""The conditions under which status reads the records of a remote run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs.monitor import QueueSnapshot
from dtslurm.services.runs.status import _may_have_news
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


def write_mirror_events(record: JobRecord, *events: tuple[str, int]) -> None:
    lines = [json.dumps({"time": time, "event": event, "exit_code": 0}) for event, time in events]
    (Path(record.mirror) / "events.jsonl").write_text("\n".join(lines) + "\n")


def requests_records(record: JobRecord, *seen: JobStatus) -> bool:
    return _may_have_news(record, QueueSnapshot({"7": list(seen)}, 130.0))


def test_the_records_of_an_active_run_are_not_requested(record: JobRecord) -> None:
    assert not requests_records(record, RUNNING)


def test_the_records_of_a_run_unknown_to_the_scheduler_are_requested(record: JobRecord) -> None:
    assert requests_records(record)
    assert requests_records(record, replace(RUNNING, state=JobState.UNKNOWN))


def test_the_records_of_a_finished_run_are_requested_until_its_end_is_fetched(record: JobRecord) -> None:
    assert requests_records(record, DONE)
    write_mirror_events(record, ("started", 100))
    assert requests_records(replace(record, final=(DONE,)), DONE)
    write_mirror_events(record, ("started", 100), ("ended", 119))
    assert not requests_records(replace(record, final=(DONE,)), DONE)


def test_the_records_of_a_requeued_run_are_requested_after_its_new_end(record: JobRecord) -> None:
    write_mirror_events(record, ("started", 100), ("ended", 119))
    again = replace(DONE, state=JobState.FAILED, start_time=200, end_time=220)
    assert requests_records(replace(record, final=(DONE,)), again)


def test_an_unchanged_final_status_is_saved_once(record: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
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
