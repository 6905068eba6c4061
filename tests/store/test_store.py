from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import RunExists, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.store import codec
from dtslurm.store.index import Index
from dtslurm.store.rundir import RunDir
from dtslurm.transport.local import LocalTransport


def run_record(path: Path, token: str = "abc", **values: object) -> JobRecord:
    base = JobRecord(
        token=token, cluster="local", name="train", run_dir=str(path), phase="planned", created_at=1.0
    )
    return replace(base, **values)  # type: ignore[arg-type]


def run_files(record: JobRecord, script: bytes = b"", **details: object) -> dict[str, bytes]:
    document = codec.encode({"schema": codec.SCHEMA, **codec.plain(record), **details})
    return {RunDir.RECORD: document, RunDir.SCRIPT: script, "secrets": b"export KEY=value"}


def test_a_written_record_is_read_back_unchanged(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    script = b"#!/bin/bash\n# \xff\n"
    run.create(LocalTransport(), run_files(run_record(run.path), git={"commit": "1"}, script=script))
    assert run.load() == run_record(run.path)
    assert run.script_path.read_bytes() == b"#!/bin/bash\n# \xff\n"
    status = JobStatus(job_id="7", state=JobState.FAILED, flags=frozenset({StateFlag.REQUEUED}), exit_code=3)
    ended = run_record(run.path, job_id="7", phase="submitted", final=(status,))
    run.update(LocalTransport(), ended)
    assert run.load() == ended
    assert run.document()["git"] == {"commit": "1"}
    assert not (run.path / "secrets").exists()
    with pytest.raises(RunExists):
        run.create(LocalTransport(), run_files(run_record(run.path)))


def test_c21_run_folders_are_private_at_every_depth(tmp_path: Path) -> None:
    """The supervisor files of a remote run have this depth."""
    run = RunDir(tmp_path / "run")
    run.create(LocalTransport(), {**run_files(run_record(run.path)), "supervisor/worker/disk.py": b"pass"})
    assert (run.path / "supervisor/worker/disk.py").read_bytes() == b"pass"
    folders = [run.path, run.path / "supervisor", run.path / "supervisor/worker"]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_f76_newer_and_damaged_records_are_reported(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(StoreError, match="cannot read"):
        run.load()
    run.record_path.write_text('{"schema": 2}')
    with pytest.raises(StoreError, match="schema 2"):
        run.load()
    run.record_path.write_text('{"schema": 1')
    with pytest.raises(StoreError, match="not JSON"):
        run.load()
    run.record_path.write_text('{"schema": 1}')
    with pytest.raises(StoreError, match="is not a complete record"):
        run.load()


def test_f76_truncated_rank_records_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "0"
    folder.mkdir(parents=True)
    good = {
        "schema": 1, "rank": 10, "local_rank": 0, "node_rank": 1, "host": "n", "pid": 3,
        "started": 1, "ended": 2, "exit_code": 1, "signal": None,
    }  # fmt: skip
    (folder / "10.json").write_text(json.dumps(good))
    (folder / "10.error.json").write_text(json.dumps({"message": {"message": "ValueError: boom"}}))
    (folder / "2.json").write_text('{"schema": 1, "rank": 2')
    (folder / ".3.json").write_text("{}")
    [result] = RunDir(tmp_path).ranks(0)
    assert (result.rank, result.error) == (10, "ValueError: boom")


def test_f76_truncated_events_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\nnot json\n[1]\n{"event": "end')
    assert RunDir(tmp_path).events() == [{"event": "started"}]


def test_the_index_finds_runs_by_token_job_id_name_and_folder(tmp_path: Path) -> None:
    index = Index(tmp_path / "state" / "runs.sqlite")
    run = RunDir(tmp_path / "runs" / "train-1-abc")
    run.create(LocalTransport(), run_files(run_record(run.path, job_id="7")))
    index.put(run_record(run.path, job_id="7"))
    for selector in ("abc", "7", "train", "train-1-abc"):
        assert index.find(selector) == [run.path]
    assert index.find("8") == []
    assert index.find("7", cluster="slurm") == []
    assert (tmp_path / "state" / "runs.sqlite").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("exact", [{"token": "107"}, {"job_id": "107"}])
def test_a_run_named_like_another_job_id_does_not_hide_the_other_run(
    tmp_path: Path, exact: dict[str, str]
) -> None:
    index = Index(tmp_path / "runs.sqlite")
    index.put(run_record(tmp_path / "victim", **{"token": "a", **exact}))
    index.put(run_record(tmp_path / "other", token="b", name="107", job_id="108", created_at=2.0))
    assert index.find("107") == [tmp_path / "victim"]
    assert index.find("107", cluster="elsewhere") == []


def test_a_selector_is_not_a_pattern(tmp_path: Path) -> None:
    index = Index(tmp_path / "runs.sqlite")
    index.put(run_record(tmp_path / "train-1", name="x"))
    for selector in ("%", "train_1", "TRAIN-1", "rain-1"):
        assert index.find(selector) == []


def test_the_newest_runs_of_a_cluster_are_found_among_other_clusters(tmp_path: Path) -> None:
    index = Index(tmp_path / "runs.sqlite")
    for number in range(5):
        cluster = "mine" if number == 0 else "theirs"
        index.put(
            run_record(tmp_path / str(number), token=str(number), cluster=cluster, created_at=float(number))
        )
    assert index.run_dirs(limit=2) == [tmp_path / "4", tmp_path / "3"]
    assert index.run_dirs(limit=2, cluster="mine") == [tmp_path / "0"]


def test_f76_the_index_can_be_rebuilt(tmp_path: Path) -> None:
    for number in range(3):
        run = RunDir(tmp_path / "runs" / f"r{number}")
        run.create(LocalTransport(), run_files(run_record(run.path, token=str(number))))
    (tmp_path / "runs" / "stray").mkdir()
    index = Index(tmp_path / "runs.sqlite")
    assert index.rebuild([tmp_path / "runs"]) == 3
    assert len(index.run_dirs()) == 3


def test_f76_a_damaged_index_is_reported_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "runs.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="not a database") as caught:
        Index(tmp_path / "runs.sqlite").run_dirs()
    assert "builds it again" in caught.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"Not a directory|File exists") as caught:
        Index(tmp_path / "file" / "runs.sqlite").run_dirs()
    assert caught.value.hint == "set XDG_STATE_HOME to a folder that you can write to"


def test_several_threads_can_write_the_index(tmp_path: Path) -> None:
    index = Index(tmp_path / "runs.sqlite")
    threads = [
        threading.Thread(target=index.put, args=(run_record(tmp_path / str(number), token=str(number)),))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.run_dirs()) == 20
