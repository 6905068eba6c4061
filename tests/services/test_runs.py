"""The list of runs, and the selectors of a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.records import remember
from dtslurm.services.runs.runs import find, recent, selector_arguments
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.store.index import note_missing
from dtslurm.store.rundir import RunDir


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cwd=tmp_path, env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})


def create_run(context: Context, number: int, cluster: str, job: str, name: str = "") -> JobRecord:
    record = JobRecord(
        token=str(number),
        cluster=cluster,
        name="train",
        run_dir=str(context.cwd / (name or f"run-{number}")),
        phase="submitted",
        created_at=float(number),
        job_id=job,
    )
    run = RunDir(Path(record.run_dir))
    run.create(context.transport, {RunDir.RECORD: codec.encode({"schema": 1, **codec.plain(record)})})
    context.index.put(record)
    return record


def test_a_run_submitted_while_the_index_is_read_only_is_found_later(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {**context.env, "DTSLURM_RUN_ROOT": str(tmp_path)}
    create_run(context, 1, "big", "6")
    with monkeypatch.context() as during:
        during.setattr("dtslurm.services.wiring.context.explain_unwritable", lambda path: "it is read-only")
        submitter = Context(cwd=tmp_path, env=env)
        record = create_run(submitter, 2, "big", "7", name="train-20260131-101500-0123456789ab")
        remember(submitter.index, record)
        assert submitter._scratch is not None
        submitter._scratch.cleanup()
    later = Context(cwd=tmp_path, env=env)
    assert find(later, "7") == record
    assert [run.job_id for run in recent(later, 9)] == ["7", "6"]
    assert not list(tmp_path.glob(".not-indexed-*"))


@pytest.mark.parametrize("name", ["../elsewhere/train-20260131-101500-0123456789ab", "train", "\0"])
def test_a_note_of_another_name_inserts_nothing(context: Context, tmp_path: Path, name: str) -> None:
    create_run(context, 1, "big", "6")
    note_missing(tmp_path / "train")
    [notes] = tmp_path.glob(".not-indexed-*")
    notes.write_text(f"{name}\n")
    context.index.insert_missing(tmp_path)
    assert [row.job_id for row in context.index.rows()] == ["6"]


def test_recent_and_find_skip_runs_of_other_clusters_and_deleted_runs(context: Context) -> None:
    mine = create_run(context, 1, "mine", "101")
    runs = [create_run(context, number, "theirs", f"10{number}") for number in (2, 3, 4)]
    assert recent(context, 1, "mine") == [mine]
    assert find(context, None, "mine") == mine
    assert recent(context, 2) == [runs[2], runs[1]]
    shutil.rmtree(runs[2].run_dir)
    shutil.rmtree(runs[1].run_dir)
    assert recent(context, 2) == [runs[0], mine]


def test_a_lost_index_is_rebuilt_from_the_home_folder(context: Context) -> None:
    run = create_run(Context(cwd=context.cwd / "dtslurm-runs", env=context.env), 1, "mine", "101")
    shutil.rmtree(context.cwd / "state")
    assert recent(context, 9) == [run]


@pytest.mark.parametrize("word", ["train_typo", "train_2", "1_2", "101_typo", "101_", "101_2x", "101_2_3"])
def test_find_refuses_words_that_only_begin_with_a_job_id_or_name(context: Context, word: str) -> None:
    create_run(context, 1, "mine", "101")  # its token is 1, its name train
    with pytest.raises(JobNotFound, match=f"no run '{word}' is known on this machine"):
        find(context, word)


@pytest.mark.parametrize("task", ["101_2", "101_[2-3]"])
def test_an_array_task_id_selects_its_run(context: Context, task: str) -> None:
    mine = create_run(context, 1, "mine", "101")
    assert find(context, task) == mine


def test_selector_arguments_name_the_cluster_if_a_job_id_is_ambiguous(context: Context) -> None:
    here, there = create_run(context, 1, "local", "7"), create_run(context, 2, "big", "7")
    other = create_run(context, 3, "big", "8")
    with pytest.raises(RequestInvalid, match="several clusters: big, local"):
        find(context, "7")
    assert selector_arguments(context, here) == "7 --cluster local"
    assert selector_arguments(context, there) == "7 --cluster big"
    assert selector_arguments(context, other) == "8"
    assert selector_arguments(context, replace(other, job_id=None)) == "3"
