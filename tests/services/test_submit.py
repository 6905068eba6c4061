"""Submissions on a full disk, and submissions without an answer."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs import records
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import views
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('trained')\n")
    return Context(cwd=project)


def test_f16_a_job_queued_before_the_disk_filled_is_still_known(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error message would lead the user to submit the job again."""

    def full(*_: Any) -> None:
        raise StoreError("the disk is full")

    prepared = prepare(context, JobRequest(script="train.py", cluster="local", time="5"), standalone=False)
    with monkeypatch.context() as disk:
        disk.setattr(RunDir, "update", full)
        record = submit(context, prepared)
    assert record.job_id is not None
    (view,) = views(context, [find(context, record.token)])
    assert view.record.job_id == record.job_id


def test_f18_a_waiting_submission_submits_after_the_first_was_refused(context: Context) -> None:
    """Two clients submit with the same key; the first is refused and deletes its folder."""
    request = JobRequest(script="train.py", cluster="local", time="5", once="nightly")
    prepared = prepare(context, request, standalone=False)
    folder = Path(prepared.submission.run_dir)
    (folder / "logs").mkdir(parents=True)
    waited: list[float] = []

    def refused(seconds: float) -> None:
        waited.append(seconds)
        assert len(waited) < 5, "it waits for nobody"
        shutil.rmtree(folder, ignore_errors=True)

    context.sleep = refused
    assert submit(context, prepared).job_id is not None
    assert waited


@pytest.mark.parametrize(
    ("phase", "age", "then"),
    [
        ("unknown", 50, "unknown"),
        ("unknown", 70, "withdrawn"),
        ("planned", 130, "planned"),  # its sbatch may still ask a busy controller again
        ("planned", 250, "withdrawn"),
    ],
)
def test_f21_an_unanswered_submission_is_withdrawn_after_its_client_gave_up(
    context: Context, tmp_path: Path, phase: str, age: float, then: str
) -> None:
    def nothing(_: str) -> None:
        return None

    run = RunDir(tmp_path / "run")
    record = JobRecord(
        token="0123456789ab", cluster="local", name="mine", run_dir=str(run.path), phase=phase,
        created_at=time.time() - age, profile="",
    )  # fmt: skip
    document = codec.encode({"schema": codec.SCHEMA, **codec.plain(record)})
    run.create(context.transport, {RunDir.RECORD: document})
    scheduler = SimpleNamespace(find=nothing)
    cluster: Any = SimpleNamespace(name="local", scheduler=scheduler, transport=context.transport)
    assert records.settle(context, cluster, record).phase == then
    assert run.load().phase == then
    assert (run.path / "claim").is_symlink() == (then == "withdrawn")


@contextmanager
def full_disk() -> Iterator[None]:
    """Prevent every write of this process, as on a full disk; this includes the log of pytest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            os.write(os.memfd_create("full"), b"x")
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_f16_a_failed_event_write_does_not_stop_a_submission(context: Context, tmp_path: Path) -> None:
    record = JobRecord(
        token="0123456789ab", cluster="local", name="mine", run_dir=str(tmp_path), phase="submitted",
        created_at=0.0, profile="", job_id="1",
    )  # fmt: skip
    with full_disk():
        records.append_event(context, record, "submitted", job_id="1")
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_f16_a_failed_marker_write_does_not_stop_a_submission(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with full_disk(), run.under_way():
        pass
    assert not list(tmp_path.iterdir())
