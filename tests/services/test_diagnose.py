"""The diagnosis of a job: what it queries from Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.diagnose import findings
from dtslurm.errors import SlurmUnavailable
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.observe import diagnose as service
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context

START, END = 1_795_000_000, 1_795_000_600
FAILED = JobStatus(
    job_id="17_3", raw_id="20", state=JobState.FAILED, start_time=START, end_time=END, source="sacct"
)
SIGNALLED = {"exit_code": 143, "signal": 15}


class Controller:
    """A scheduler that knows when a job was preempted, and records which jobs are queried."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.answer = answer
        self.queried: list[str] = []

    def read_job_record(self, job_id: str) -> JobStatus | None:
        self.queried.append(job_id)
        if isinstance(self.answer, Exception):
            raise self.answer
        return None if self.answer is None else replace(FAILED, preempted_at=self.answer)


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    (tmp_path / "logs" / "0").mkdir(parents=True)
    return JobRecord(
        token="t", cluster="hpc", name="llama", run_dir=str(tmp_path), phase="submitted", created_at=0.0,
        job_id="17",
    )  # fmt: skip


def diagnose(
    monkeypatch: pytest.MonkeyPatch,
    record: JobRecord,
    status: JobStatus,
    scheduler: object,
    **rank_record: Any,
) -> service.Diagnosis:
    values = {"rank": 0, "host": "n1", "started": START + 5, "ended": END - 1, **rank_record}
    evidence = findings.read({"records": [{**values, "written": END - 1}]}, [], 1)
    cluster = SimpleNamespace(access=SimpleNamespace(scheduler="slurm"), scheduler=scheduler)
    monkeypatch.setattr(Context, "cluster_of", lambda *_: cluster)
    monkeypatch.setattr(service, "refresh", lambda *_: None)
    monkeypatch.setattr(service, "views", lambda *_: [RunView(record, (status,))])
    monkeypatch.setattr(service, "add_activity", lambda views, _: views)
    monkeypatch.setattr(service, "find_worker_host", lambda *_: None)
    monkeypatch.setattr(service, "gather", lambda *_: evidence)
    monkeypatch.setattr(service, "store_run_notes", lambda *_: None)
    return service.diagnose(Context(cwd=Path("/"), env={}), record)


def test_a_preemption_that_the_state_does_not_show_is_queried_once(
    monkeypatch: pytest.MonkeyPatch, record: JobRecord
) -> None:
    controller = Controller(END - 2)
    result = diagnose(monkeypatch, record, FAILED, controller, **SIGNALLED)
    assert (result.verdict.cause, result.verdict.blame) == ("preempted", "site")
    assert controller.queried == ["20"]


@pytest.mark.parametrize(
    "answer",
    [None, START - 1, END + 1, SlurmUnavailable("no answer")],
    ids=["none", "before", "after", "error"],
)
def test_a_signal_stays_the_cause_if_slurm_shows_no_preemption_of_the_job(
    monkeypatch: pytest.MonkeyPatch, record: JobRecord, answer: int | Exception | None
) -> None:
    controller = Controller(answer)
    assert diagnose(monkeypatch, record, FAILED, controller, **SIGNALLED).verdict.cause == "killed"
    assert len(controller.queried) == 1


@pytest.mark.parametrize(
    ("status", "rank_record"),
    [
        (FAILED, {"exit_code": 3}),
        (replace(FAILED, state=JobState.PREEMPTED), SIGNALLED),
        (replace(FAILED, state=JobState.CANCELLED), SIGNALLED),
        (replace(FAILED, state=JobState.RUNNING, end_time=None), SIGNALLED),
        (replace(FAILED, state=JobState.COMPLETED), {"exit_code": 0}),
        (replace(FAILED, source="scontrol"), SIGNALLED),
    ],
    ids=["exit code", "preempted", "cancelled", "running", "completed", "known from scontrol"],
)
def test_slurm_is_not_queried_about_a_preemption_without_need(
    monkeypatch: pytest.MonkeyPatch, record: JobRecord, status: JobStatus, rank_record: dict[str, Any]
) -> None:
    controller = Controller(END - 2)
    diagnose(monkeypatch, record, status, controller, **rank_record)
    assert controller.queried == []


def test_a_preemption_known_from_scontrol_needs_no_query(
    monkeypatch: pytest.MonkeyPatch, record: JobRecord
) -> None:
    known = replace(FAILED, source="scontrol", preempted_at=END - 2)
    controller = Controller(None)
    assert diagnose(monkeypatch, record, known, controller, **SIGNALLED).verdict.cause == "preempted"
    earlier = replace(known, preempted_at=START - 1)  # of an earlier start of the job
    assert diagnose(monkeypatch, record, earlier, controller, **SIGNALLED).verdict.cause == "killed"
    assert controller.queried == []


def test_a_scheduler_without_job_records_is_not_queried(
    monkeypatch: pytest.MonkeyPatch, record: JobRecord
) -> None:
    assert diagnose(monkeypatch, record, FAILED, object(), **SIGNALLED).verdict.cause == "killed"
