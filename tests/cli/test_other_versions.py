"""Runs of an earlier and of a later version of dtslurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.index import Index, default_path
from tests.cli.conftest import Run

# Made by a version of two days before, with its embedded scheduler: one run with a supervisor, one without.
EARLIER = Path(__file__).parent / "earlier_version"


@pytest.fixture
def earlier_runs(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run root with the runs of the earlier version, whose installation is still there."""
    root, other = tmp_path / "root", tmp_path / "other"
    shutil.copytree(EARLIER, root)
    for path in root.rglob("*"):
        if path.is_file():
            text = path.read_text()
            for name, place in (("@RUNS@", root), ("@WORK@", folder), ("@OTHER@", other)):
                text = text.replace(name, str(place))
            path.write_text(text)
    for path in (root, *root.iterdir()):
        path.chmod(0o700)
    (other / "cluster_profiles").mkdir(parents=True)
    (other / "cluster_profiles" / "local.yaml").write_text("name: local\nscheduler: local\n")
    (other / "dtslurm").mkdir()
    (other / "dtslurm" / "assets.py").touch()
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(root))
    monkeypatch.delenv("DTSLURM_TRUSTED_FOLDERS", raising=False)
    return root


def test_runs_of_an_earlier_version_are_readable(invoke: Run, earlier_runs: Path) -> None:
    rows = [line.split()[:5] for line in invoke("status", code=0).stdout.splitlines()[1:]]
    assert rows == [["3", "old-sup", "local", "FAILED", "1"], ["2", "old-bad", "local", "FAILED", "1"]]
    for job, attempt in (("2", 0), ("3", 1)):
        assert "FAILED" in invoke("status", job, code=0).stdout
        verdict = invoke("diagnose", job, code=0).stdout
        assert re.search(
            r"failed first  rank 0 \(local rank 0\) on local1 at [-\d: ]+ with exit code 3\n", verdict
        )
        assert "[0] hello\n" in invoke("logs", job, "--attempt", str(attempt), code=0).stdout


def test_unknown_fields_of_a_later_version_are_kept(invoke: Run, folder: Path, tmp_path: Path) -> None:
    words = ("submit", "--cluster", "local", "-t", "5", "--run-root", str(tmp_path / "root"), "--json")
    record: dict[str, Any] = json.loads(invoke(*words, "train.py", code=0).stdout)["run"]
    path = Path(record["run_dir"]) / "job.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "colour": "blue", "spec": {**document["spec"], "mood": "calm"}}))
    events = Path(record["run_dir"]) / "events.jsonl"
    with events.open("a") as file:
        file.write('{"time": 1, "event": "dreamed", "of": ["sheep"]}\n')
    invoke("status", record["job_id"], code=0)
    invoke("cancel", record["job_id"], code=0)
    invoke("status", code=0)
    kept = json.loads(path.read_text())
    assert (kept["colour"], kept["spec"]["mood"]) == ("blue", "calm")
    assert "dreamed" in events.read_text()


def test_the_index_of_a_later_version_is_usable(invoke: Run, folder: Path, tmp_path: Path) -> None:
    words = ("submit", "--cluster", "local", "-t", "5", "--run-root", str(tmp_path / "root"), "train.py")
    invoke(*words, code=0)
    with sqlite3.connect(default_path(os.environ)) as connection:
        connection.execute("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'")
        connection.execute("PRAGMA user_version=7")
    invoke(*words, code=0)
    assert [row.job_id for row in Index(default_path(os.environ)).rows()] == ["2", "1"]
