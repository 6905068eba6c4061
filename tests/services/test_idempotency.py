"""Concurrent submissions with the same idempotency key."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import StoreError
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.runs import recent
from dtslurm.services.submit import submit as service
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context
from tests.waiting import wait_until

PATIENCE_S = 120.0
REQUEST = JobRequest(script="train.py", cluster="local", time="5", once="night")

# Stops when its run directory is there and the scheduler is about to be called.
CLIENT = """
import pathlib, time
from dtslurm.scheduler.local import LocalScheduler
from dtslurm.services.wiring.context import Context
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from tests.services.test_idempotency import REQUEST

real = LocalScheduler.submit

def slowly(*args, **options):
    pathlib.Path("at").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    return real(*args, **options)

LocalScheduler.submit = slowly
context = Context()
print(submit(context, prepare(context, REQUEST, standalone=False)).job_id)
"""


class Waited(Exception):
    """The submission waits for another."""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    for kind in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    (tmp_path / "project").mkdir()
    for script in ("train.py", "other.py"):
        (tmp_path / "project" / script).write_text("")
    return Context(cwd=tmp_path / "project")


def run_directory_and_token(context: Context, **asked: str) -> tuple[str, str]:
    request = JobRequest(**{"script": "train.py", "cluster": "local", "time": "5", "once": "night", **asked})  # type: ignore[arg-type]
    submission = prepare(context, request, standalone=False).submission
    return submission.run_dir, submission.token


def test_an_idempotency_key_determines_the_run_directory_and_token(context: Context, tmp_path: Path) -> None:
    here = run_directory_and_token(context, run_root=str(tmp_path / "runs"))
    assert here == run_directory_and_token(
        context, script="other.py", job_name="x", run_root=str(tmp_path / "runs")
    )
    assert here[0] != run_directory_and_token(context, once="night2", run_root=str(tmp_path / "runs"))[0]
    assert here[1] != run_directory_and_token(context, run_root=str(tmp_path / "more"))[1]


@pytest.fixture
def first_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Start a client that stops in the middle of its submission."""
    for kind in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    Path("train.py").write_text("")
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    wait_until(Path("at").exists)
    with client:
        yield client
        client.kill()


def submit_again() -> str | None:
    """Submit under the same key, with a clock that stands still."""

    def sleep(_: float) -> None:
        raise Waited

    now = time.time()
    context = Context(clock=lambda: now, sleep=sleep)
    return service.submit(context, prepare(context, REQUEST, standalone=False)).job_id


def test_f18_a_submission_waits_for_another_with_the_same_key(first_client: subprocess.Popen[str]) -> None:
    with pytest.raises(Waited):
        submit_again()
    Path("go").touch()
    said, _ = first_client.communicate(timeout=PATIENCE_S)
    assert submit_again() == said.strip()
    assert len(recent(Context(), 10)) == 1


def test_f2_a_submission_replaces_a_killed_client_with_the_same_key(
    first_client: subprocess.Popen[str],
) -> None:
    first_client.kill()
    first_client.communicate()
    job = submit_again()
    assert job is not None
    assert submit_again() == job
    [record] = recent(Context(), 10)
    assert record.job_id == job
    assert not (Path(record.run_dir) / "submitting").exists()


def test_f16_a_submission_on_a_full_disk_does_not_delete_the_run_of_another_client(
    first_client: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("disk full: cannot write its files")

    with monkeypatch.context() as patched:
        patched.setattr(service, "deliver", full)
        with pytest.raises(StoreError):
            submit_again()
    Path("go").touch()
    said, _ = first_client.communicate(timeout=PATIENCE_S)
    assert [record.job_id for record in recent(Context(), 10)] == [said.strip()]
