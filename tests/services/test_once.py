"""A second submission under a key waits for one that is under way, and not for one whose client is dead."""

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
from tests.services.test_once import REQUEST

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


def place_of(context: Context, **asked: str) -> tuple[str, str]:
    request = JobRequest(**{"script": "train.py", "cluster": "local", "time": "5", "once": "night", **asked})  # type: ignore[arg-type]
    submission = prepare(context, request, standalone=False).submission
    return submission.run_dir, submission.token


def test_a_key_has_one_place_whatever_the_job_is_called(context: Context, tmp_path: Path) -> None:
    here = place_of(context, run_root=str(tmp_path / "runs"))
    assert here == place_of(context, script="other.py", job_name="x", run_root=str(tmp_path / "runs"))
    assert here[0] != place_of(context, once="night2", run_root=str(tmp_path / "runs"))[0]
    assert here[1] != place_of(context, run_root=str(tmp_path / "more"))[1]


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A client in the middle of its submission."""
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


def second() -> str | None:
    """Submit under the same key, with a clock that stands still."""

    def sleep(_: float) -> None:
        raise Waited

    now = time.time()
    context = Context(clock=lambda: now, sleep=sleep)
    return service.submit(context, prepare(context, REQUEST, standalone=False)).job_id


def test_f18_one_that_is_under_way_is_waited_for(first: subprocess.Popen[str]) -> None:
    with pytest.raises(Waited):
        second()
    Path("go").touch()
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert second() == said.strip()
    assert len(recent(Context(), 10)) == 1


def test_f2_one_whose_client_was_killed_is_not_waited_for(first: subprocess.Popen[str]) -> None:
    first.kill()
    first.communicate()
    job = second()
    assert job is not None
    assert second() == job
    [record] = recent(Context(), 10)
    assert record.job_id == job
    assert not (Path(record.run_dir) / "submitting").exists()


def test_f16_one_that_finds_the_disk_full_takes_away_no_other_ones_run(
    first: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("disk full: cannot write its files")

    with monkeypatch.context() as patched:
        patched.setattr(service, "deliver", full)
        with pytest.raises(StoreError):
            second()
    Path("go").touch()
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert [record.job_id for record in recent(Context(), 10)] == [said.strip()]
