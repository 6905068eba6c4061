"""Values that the run's own files correct in the scheduler's answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs.run_evidence import (
    NOT_STARTED_AGAIN,
    describe_failure,
    reconcile_with_records,
    status_from_run_files,
)
from dtslurm.store.rundir import RunDir

ENDED = JobStatus(job_id="7", state=JobState.FAILED, exit_code=1, nodes=4, nodelist="n1", end_time=120)


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    return JobRecord(
        token="a" * 12,
        script_hash="b" * 16,
        cluster="here",
        name="train",
        run_dir=str(tmp_path),
        job_id="7",
        phase="submitted",
        created_at=90.0,
    )


def write_events(record: JobRecord, *events: dict[str, object]) -> None:
    lines = "".join(json.dumps({"time": 100, **event}) + "\n" for event in events)
    (Path(record.run_dir) / "events.jsonl").write_text(lines)


@pytest.mark.parametrize("listed", ["n1", "n[1-3]"])
@pytest.mark.parametrize("state", [JobState.FAILED, JobState.COMPLETED, JobState.TIMEOUT])
def test_an_incomplete_node_list_of_accounting_is_completed_from_the_run_events(
    record: JobRecord, listed: str, state: JobState
) -> None:
    write_events(record, {"event": "started", "nodes": "n[1-4]"}, {"event": "ended", "exit_code": 1})
    assert reconcile_with_records(record, replace(ENDED, state=state, nodelist=listed)).nodelist == "n[1-4]"


def test_a_complete_node_list_of_accounting_is_kept(record: JobRecord) -> None:
    write_events(record, {"event": "started", "nodes": "n[1-4]"})
    assert reconcile_with_records(record, replace(ENDED, nodelist="n[2-5]")).nodelist == "n[2-5]"


def test_a_requeued_job_cancelled_before_its_start_has_no_nodes(record: JobRecord) -> None:
    write_events(record, {"event": "started", "nodes": "n[1-4]"}, {"event": "ended", "exit_code": 143})
    cancelled = replace(ENDED, state=JobState.CANCELLED, nodelist="")
    assert reconcile_with_records(record, cancelled).nodelist == ""


def test_a_status_is_unchanged_if_the_script_recorded_no_start(record: JobRecord) -> None:
    assert reconcile_with_records(record, ENDED) == ENDED


def test_the_exit_code_is_the_code_that_the_script_recorded(record: JobRecord) -> None:
    write_events(record, {"event": "started", "nodes": "n1"}, {"event": "ended", "exit_code": 137})
    assert reconcile_with_records(record, replace(ENDED, exit_code=9, nodes=1)).exit_code == 137


def test_a_restart_that_slurm_could_not_start_is_reported(record: JobRecord) -> None:
    write_events(record, {"event": "started", "nodes": "n1", "attempt": 0})
    again = reconcile_with_records(record, replace(ENDED, nodes=1, restarts=1))
    assert (again.state, again.exit_code, again.reason) == (JobState.FAILED, 1, NOT_STARTED_AGAIN)
    run = RunDir(Path(record.run_dir))
    assert describe_failure(run, again) == NOT_STARTED_AGAIN
    for others in (replace(ENDED, nodes=1), replace(ENDED, nodes=1, restarts=1, state=JobState.CANCELLED)):
        assert reconcile_with_records(record, others) == others
    write_events(record, {"event": "started", "attempt": 0}, {"event": "started", "attempt": 1})
    assert reconcile_with_records(record, replace(ENDED, nodes=1, restarts=1)).reason == ""


@pytest.mark.parametrize(
    ("state", "code", "description"),
    [
        (JobState.TIMEOUT, 143, "the time limit was reached"),
        (JobState.TIMEOUT, 1, "rank 2 failed first, exit code 1"),
        (JobState.CANCELLED, 143, "cancelled"),
        (JobState.FAILED, 143, "rank 2 failed first, exit code 143"),
        (JobState.FAILED, 1, "rank 2 failed first, exit code 1"),
    ],
)
def test_ranks_that_slurm_killed_are_not_named_as_first_failure(
    tmp_path: Path, state: JobState, code: int, description: str
) -> None:
    ranks = tmp_path / "ranks" / "0"
    ranks.mkdir(parents=True)
    (ranks / "first-failure").write_text(f"2 {code}\n")
    (tmp_path / "logs" / "0").mkdir(parents=True)
    assert describe_failure(RunDir(tmp_path), replace(ENDED, state=state, exit_code=code)) == description


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("KeyError: 'label'\n", "KeyError: 'label' (rank 2)"),
        ("", "rank 2 failed first, exit code 1"),
        ("E: " + 400 * "x" + "\nmore\n", "E: " + 297 * "x" + " (rank 2)"),
    ],
)
def test_the_exception_of_the_first_failed_rank_is_shown(tmp_path: Path, error: str, words: str) -> None:
    ranks = tmp_path / "ranks" / "0"
    ranks.mkdir(parents=True)
    (ranks / "first-failure").write_text("2 1\n")
    (ranks / "first-failure-error").write_text(error)
    (tmp_path / "logs" / "0").mkdir(parents=True)
    status = replace(ENDED, state=JobState.FAILED, exit_code=1)
    assert describe_failure(RunDir(tmp_path), status) == words


@pytest.mark.parametrize(
    ("job_id", "events", "state"),
    [
        ("7.0", ("cancel",), JobState.CANCELLED),
        ("7.0", (), JobState.FAILED),
        ("7", ("cancel",), JobState.FAILED),  # squeue shows the end of a job
    ],
)
def test_run_in_an_allocation_that_was_cancelled_and_failed_is_cancelled(
    record: JobRecord, job_id: str, events: tuple[str, ...], state: JobState
) -> None:
    between: list[dict[str, object]] = [{"event": name} for name in events]
    write_events(record, {"event": "started"}, *between, {"event": "ended", "exit_code": 143})
    [status] = status_from_run_files(replace(record, job_id=job_id), 200.0)
    assert (status.state, status.exit_code) == (state, 143)


def test_nodes_of_a_run_in_an_allocation_are_those_of_its_script(record: JobRecord) -> None:
    write_events(record, {"event": "started", "nodes": "n1,n2"})
    listed = replace(ENDED, job_id="7.0", state=JobState.RUNNING, nodes=1)
    assert reconcile_with_records(record, listed).nodelist == "n1,n2"


@pytest.mark.parametrize(("nodes", "expected"), [("n1,n2", "n1,n2"), (7, ""), (None, "")])
def test_run_that_accounting_does_not_know_yet_has_the_nodes_that_its_script_recorded(
    record: JobRecord, nodes: object, expected: str
) -> None:
    write_events(record, {"event": "started", "nodes": nodes}, {"event": "ended", "exit_code": 3})
    [status] = status_from_run_files(replace(record, job_id="7.0"), 200.0)
    assert (status.state, status.nodelist) == (JobState.FAILED, expected)
