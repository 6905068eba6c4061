"""Cleaning up: what is not surely over stays, what goes is shown first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.job import JobRecord
from dtslurm.model.state import JobState, JobStatus
from dtslurm.services import clean as service
from dtslurm.services.clean import clean
from dtslurm.services.context import Context
from dtslurm.store import codec
from dtslurm.store.delivery import Parcel, deliver
from dtslurm.store.packing import objects_folder
from dtslurm.worker import reclaim
from dtslurm.worker.disk import Outcome
from tests.store.trees import HERE, FarSide, snap, write

NOW = time.time()
DAY = 86400


class Root:
    """A run root with runs made as submitting does."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "runs"
        self.tree = tmp_path / "tree"
        self.context = Context(cwd=tmp_path, clock=lambda: NOW)
        write(self.tree, {"train.py": "print(1)\n", "shared.py": "x" * 20_000})

    def add(self, name: str, days: float, state: JobState = JobState.COMPLETED) -> Path:
        """Add a run that ended so many days ago, with a file of its own in its code."""
        write(self.tree, {"own.py": f"# {name}\n" * 3000})
        path = self.path / name
        status = JobStatus(job_id="7", state=state, end_time=int(NOW - days * DAY) if state.ended else None)
        record = JobRecord(
            token=name,
            cluster="local",
            name=name,
            run_dir=str(path),
            phase="submitted",
            created_at=NOW,
            job_id="7",
        )
        final = (status,) if state.ended else ()
        document = {"schema": 1, **codec.plain(replace(record, final=final))}
        files = {"job.json": codec.encode(document), "logs/batch.log": b"log\n" * 2000}
        deliver(HERE, Parcel(str(path), objects_folder(str(self.path)), files, snap(self.tree)))
        self.context.index.put(record)
        return path

    def objects(self) -> int:
        return sum(path.is_file() for path in Path(objects_folder(str(self.path))).rglob("*"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Root]:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    monkeypatch.setattr(reclaim, "YOUNG", -1.0)
    return Root(tmp_path)  # type: ignore[return-value]


def test_a_preview_deletes_nothing_and_says_the_sizes(root: Root) -> None:
    root.add("old", 40)
    root.add("new", 1)
    before = sorted(root.path.rglob("*"))
    [found] = clean(root.context, older_than=30 * DAY)
    assert [run.name for run in found.runs] == ["old"]
    assert (found.objects, found.trouble) == (1, ())  # its own.py; the others are shared
    assert found.objects_bytes >= 18_000
    assert sorted(root.path.rglob("*")) == before


def test_the_code_goes_and_the_logs_stay(root: Root) -> None:
    old, new = root.add("old", 40), root.add("new", 1)
    for run in (old, new):
        (run / "secrets").write_text("export TOKEN=hush\n")
    expected = clean(root.context, older_than=30 * DAY)
    assert clean(root.context, older_than=30 * DAY, remove=True) == expected
    assert not (old / "code").exists()
    assert (old / "logs" / "batch.log").exists()
    assert not (old / "secrets").exists()
    assert (new / "secrets").exists()
    assert (new / "code" / "shared.py").read_text() == "x" * 20_000
    assert root.objects() == 3
    [again] = clean(root.context, older_than=30 * DAY)
    assert (again.runs, again.objects, again.bytes) == ((), 0, 0)


def test_whole_runs_go_if_asked_for(root: Root) -> None:
    old = root.add("old", 40)
    [found] = clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert found.runs[0].bytes >= 8000
    assert not old.exists()
    assert root.objects() == 0
    assert clean(root.context, older_than=30 * DAY) == []


@pytest.mark.parametrize("state", [JobState.UNKNOWN, JobState.RUNNING, JobState.PENDING])
def test_what_is_not_surely_over_is_never_touched(root: Root, state: JobState) -> None:
    path = root.add("alive", 400, state)
    [found] = clean(root.context, older_than=1, whole=True, remove=True)
    assert found.runs == ()
    assert (path / "code" / "own.py").exists()


def test_a_job_that_ended_just_now_may_come_back(root: Root) -> None:
    root.add("fresh", 100 / DAY)
    [found] = clean(root.context, older_than=1)
    assert found.runs == ()


def test_contents_younger_than_an_hour_stay(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "YOUNG", 3600.0)
    root.add("old", 40)
    clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert root.objects() == 3


def test_what_a_killed_delivery_left_goes_after_a_day(root: Root) -> None:
    root.add("new", 1)
    for name, age in (("a", 2 * DAY), ("b", 60)):
        left = root.path / f".dtslurm-{os.geteuid()}-{name}"
        write(left, {"run/job.json": "{}"})
        os.utime(left, (NOW - age, NOW - age))
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [Path(path).name[-2:] for path in found.unfinished] == ["-a"]
    assert sorted(path.name[-2:] for path in root.path.glob(".dtslurm-*")) == ["-b"]


def test_a_link_or_a_stranger_in_place_of_a_run_is_left_alone(root: Root, tmp_path: Path) -> None:
    old = root.add("old", 40)
    old.rename(tmp_path / "precious")
    old.symlink_to(tmp_path / "precious")
    clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert (tmp_path / "precious" / "code" / "own.py").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "../x", "a\0b"])
def test_c25_only_folders_of_the_run_root_are_swept(tmp_path: Path, name: str) -> None:
    asked = {
        "root": str(tmp_path),
        "objects": str(tmp_path / "o"),
        "runs": [name],
        "whole": True,
        "remove": True,
    }
    with pytest.raises(Outcome):
        reclaim.reclaim(asked)
    with pytest.raises(Outcome):
        reclaim.reclaim({**asked, "runs": [], "root": f"{tmp_path}/../x"})


def test_over_a_link_it_does_the_same(root: Root) -> None:
    old = root.add("old", 40)
    far = FarSide()
    cluster = replace(root.context.cluster("local"), transport=far)
    root.context._clusters["local", ""] = cluster
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [run.name for run in found.runs] == ["old"]
    assert not (old / "code").exists()
    assert len(far.sent) == 2  # what Python there is, and the reclaiming
    with pytest.raises(RequestInvalid):
        service._reclaim(
            root.context, cluster, {"root": "/", "objects": "/x", "runs": [], "whole": False, "remove": False}
        )


def dtslurm(*words: str, code: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtslurm", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_command_line(root: Root) -> None:
    old = root.add("old", 40)
    shown = dtslurm("clean", code=0)
    assert "old" in shown.stdout
    assert "nothing was deleted" in shown.stderr
    assert (old / "code").exists()
    [place] = json.loads(dtslurm("clean", "--json", code=0).stdout)["roots"]
    assert place["runs"][0]["folder"] == "old"
    assert "free again" in dtslurm("clean", "--yes", code=0).stderr
    assert not (old / "code").exists()
    assert "nothing to delete" in dtslurm("clean", code=0).stderr
    assert "--older-than" in dtslurm("clean", "--older-than", "soon", code=2).stderr
