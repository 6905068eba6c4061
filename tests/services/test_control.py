"""Changes to a job require that the job id still belongs to the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import JobNotFound, RequestInvalid, SlurmError, SlurmUnavailable
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.base import Look, PartialResult
from dtslurm.services.runs import control
from dtslurm.services.runs.job_identity import belongs_to_run
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.transport.local import LocalTransport
from dtslurm.worker.delivery import reclaim

RECORD = JobRecord(
    token="ab12", script_hash="cd34", cluster="x", name="train", run_dir="", phase="submitted",
    created_at=10_000.0, job_id="51",
)  # fmt: skip
OURS = JobStatus(
    job_id="51", state=JobState.RUNNING, name="train", comment="dtslurm:ab12:cd34", submit_time=10_000,
    source="squeue",
)  # fmt: skip
FOREIGN = replace(OURS, comment="dtslurm:ff00:cd34")
VERBS = ("cancel", "requeue", "hold", "release")


class Queue:
    """A scheduler that shows these jobs, and notes what it was told to change."""

    def __init__(
        self, *shown: JobStatus, fault: Exception | None = None, partly: PartialResult | None = None
    ) -> None:
        self.shown, self.fault, self.partly = shown, fault, partly
        self.changed: list[Sequence[str]] = []

    def cancel(self, job_ids: Sequence[str], look: Look | None = None) -> PartialResult | None:
        if isinstance(self.fault, SlurmUnavailable):
            raise self.fault
        listed: Mapping[str, Sequence[JobStatus]] = {
            job: [item for item in self.shown if item.job_id.startswith(job)] for job in job_ids
        }
        assert look is not None
        look(listed)
        if self.fault is not None:
            raise self.fault
        self.changed.append(job_ids)
        return self.partly

    requeue = hold = release = cancel


def change_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, queue: Queue, job: str = "51"
) -> Any:
    record = replace(RECORD, run_dir=str(tmp_path), array="0-3" if "_" in job else None)
    place = type("Place", (), {"scheduler": queue, "transport": LocalTransport()})
    monkeypatch.setattr(Context, "cluster_of", lambda *_: place)
    monkeypatch.setattr(control, "find", lambda *_: record)
    if tmp_path.exists():
        (tmp_path / "tasks" / "2").mkdir(parents=True, exist_ok=True)
    return control.change_jobs(Context(cwd=tmp_path), verb, [job])


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_id_reused_by_another_job_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = Queue(FOREIGN)
    (tmp_path / "done").touch()
    with pytest.raises(
        JobNotFound, match=r"job 51 is no longer this run's job.*nothing was changed"
    ) as caught:
        change_job(tmp_path, monkeypatch, verb, queue)
    assert "dtslurm:ff00:cd34" in caught.value.evidence[0]
    assert "dtslurm:ab12:cd34" in caught.value.evidence[-1]
    assert queue.changed == []
    assert (tmp_path / "done").exists()
    assert not (tmp_path / "stop").exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("job", "queued_statuses"),
    [
        ("51", [OURS]),
        ("51", []),  # it left the queue: that cannot be told
        ("51", [replace(OURS, comment="")]),  # a site without comments
        ("51", [replace(OURS, comment="project x; dtslurm:ab12:cd34")]),
        ("51", [replace(OURS, job_id="51_[2-3]"), replace(OURS, job_id="51_1")]),
        ("51_2", [replace(OURS, job_id="51_2")]),
    ],
)
def test_the_job_of_the_run_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, job: str, queued_statuses: list[JobStatus]
) -> None:
    queue = Queue(*queued_statuses)
    assert change_job(tmp_path, monkeypatch, verb, queue, job).done == [job]
    assert queue.changed == [[job]]
    place = tmp_path / "tasks" / "2" if "_" in job else tmp_path
    assert (place / "stop").exists() == (verb == "cancel")


@pytest.mark.parametrize(
    ("job", "left"),
    [("51", set()), ("51_2", {"tasks/3/stop", "tasks/3/done"})],
)
def test_requeue_removes_the_stop_and_done_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, left: set[str]
) -> None:
    run = tmp_path / "a folder's *"
    for place in (run, run / "tasks/2", run / "tasks/3"):
        place.mkdir(parents=True)
        (place / "stop").touch()
        (place / "done").touch()
    change_job(run, monkeypatch, "requeue", Queue(OURS), job)
    assert {str(path.relative_to(run)) for path in run.glob("tasks/*/*")} == left
    assert not (run / "stop").exists()


@pytest.mark.parametrize(
    ("job", "removed", "said"),
    [
        ("51", "code", "deleted its code or secrets"),
        ("51_2", "code", "deleted its code or secrets"),
        ("51", "all", "does not exist"),
    ],
)
def test_a_run_whose_files_were_deleted_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, removed: str, said: str
) -> None:
    run, queue = tmp_path / "run", Queue(OURS)
    if removed == "code":
        (run / "tasks" / "2").mkdir(parents=True)
        (run / "done").touch()
        reclaim.forbid_start(os.fsencode(run))
    with pytest.raises(RequestInvalid, match=said) as caught:
        change_job(run, monkeypatch, "requeue", queue, job)
    assert caught.value.hint.startswith("dtslurm resubmit 51")
    assert queue.changed == []
    if removed == "code":
        assert (run / "done").exists()
        assert change_job(run, monkeypatch, "cancel", queue, job).done == [job]


def test_a_finished_run_whose_secrets_were_deleted_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.sbatch").write_text(f"#!/bin/bash\n{control.SECRETS_DELETED}\n")
    assert change_job(tmp_path, monkeypatch, "requeue", Queue(OURS)).done == ["51"]  # it runs
    over = replace(RECORD, final=(replace(OURS, state=JobState.COMPLETED),))
    monkeypatch.setattr(f"{__name__}.RECORD", over)
    queue = Queue(OURS)
    with pytest.raises(RequestInvalid, match="deleted the run's secrets") as caught:
        change_job(tmp_path, monkeypatch, "requeue", queue)
    assert caught.value.hint == "dtslurm resubmit 51 --from-checkpoint submits the run again with the secrets"
    assert queue.changed == []
    (tmp_path / "script.sbatch").write_text("#!/bin/bash\n")
    monkeypatch.setattr(RunDir, "update", lambda *_: None)  # there is no job.json
    assert change_job(tmp_path, monkeypatch, "requeue", queue).done == ["51"]


def event_names(run: Path) -> list[str]:
    return [event["event"] for event in RunDir(run).events()]


def test_requeue_reports_tasks_that_are_already_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(OURS, partly=PartialResult(("51",), waiting=("51_2-3",)))
    acted = change_job(tmp_path, monkeypatch, "requeue", queue)
    assert acted.lines("requeue") == ["requeued: 51", "already pending: 51_2-3"]
    assert event_names(tmp_path) == ["requeue"]


@pytest.mark.parametrize(("done", "events"), [(("51",), ["requeue"]), (("52",), [])])
def test_a_partly_refused_requeue_records_only_the_changed_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: tuple[str], events: list[str]
) -> None:
    queue = Queue(OURS, partly=PartialResult(done, ("51_3",), ("51_2: disabled",)))
    with pytest.raises(
        SlurmError, match="requeue: Slurm refused some of the jobs; the others were changed"
    ) as caught:
        change_job(tmp_path, monkeypatch, "requeue", queue)
    assert caught.value.evidence == ("51_2: disabled", "already pending: 51_3", f"requeued: {done[0]}")
    assert event_names(tmp_path) == events


def test_a_run_can_be_changed_by_a_name_that_begins_with_its_job_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(OURS)
    monkeypatch.setitem(globals(), "RECORD", replace(RECORD, name="51_long"))
    assert change_job(tmp_path, monkeypatch, "hold", queue, "51_long").done == ["51"]


def test_cancel_writes_the_stop_file_if_slurm_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SlurmUnavailable):
        change_job(tmp_path, monkeypatch, "cancel", Queue(fault=SlurmUnavailable("down")))
    assert (tmp_path / "stop").exists()


def test_requeue_of_a_job_that_slurm_purged_suggests_resubmit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobNotFound) as caught:
        change_job(
            tmp_path, monkeypatch, "requeue", Queue(fault=JobNotFound("scontrol requeue: no such job"))
        )
    assert "dtslurm resubmit 51" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "own"),
    [
        (OURS, True),
        (replace(OURS, name="renamed"), True),
        (FOREIGN, False),
        (replace(OURS, comment="", name="other"), False),
        (replace(OURS, comment="", submit_time=5_000), False),
        (replace(OURS, comment="", submit_time=9_900), True),  # clocks differ
        (replace(OURS, source="sacct", comment=""), True),
        (replace(OURS, source="sacct", comment="", name=""), True),
        (replace(OURS, source="sacct", comment="", name="other"), False),
        (replace(OURS, source="sacct", comment="", submit_time=None, start_time=5_000), False),
        (replace(OURS, source="sacct", comment="", submit_time=20_000), True),  # started anew
        (replace(OURS, source="record", comment="", name="other", start_time=1), True),
    ],
)
def test_belongs_to_run_compares_comment_name_and_times(status: JobStatus, own: bool) -> None:
    assert belongs_to_run(RECORD, status) is own
