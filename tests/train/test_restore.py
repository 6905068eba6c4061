"""Checkpoints: killed saves, damaged files, full disks, and other numbers of ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import fsdp

from dtslurm import train
from dtslurm.train import folder as store
from tests import disks
from tests.train.conftest import Job, flat, same

checkpoint_module: Any = sys.modules["dtslurm.train.checkpoint"]


def test_undisturbed_run_writes_complete_checkpoints(undisturbed: Job) -> None:
    assert undisturbed.names() == ["step-00000016-a0", "step-00000020-a0", "step-00000021-a0"]
    assert [item["step"] for item in undisturbed.events("checkpoint")] == [4, 8, 12, 16, 20, 21]
    manifest = json.loads((undisturbed.checkpoints / "step-00000021-a0" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"], manifest["world_size"]) == (1, 21, 2)
    files = {path.name for path in (undisturbed.checkpoints / "step-00000021-a0").iterdir()}
    assert files == {"manifest.json", *manifest["files"]}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= files
    epochs = undisturbed.samples()
    assert all(flat(steps) == list(range(50)) for steps in epochs.values())
    assert undisturbed.text(0).count("\n") == 1, undisturbed.text(0)  # training prints nothing by itself


# Changes of the checkpoint folder in the save of step 8, of which each rank that dies leaves a log beside it:
# rank 0 makes the folder, opens its file and the index's, renames that, opens the manifest, renames the
# folder, renames the checkpoint of step 4, and deletes it; rank 1 makes the folder and opens its file.
POINTS = [(0, number) for number in range(7, 15)] + [(1, 3), (1, 4)]


@pytest.mark.parametrize(("victim", "number"), POINTS)
def test_f39_f68_training_killed_at_any_folder_change_during_a_save_resumes_exactly(
    job: Job, undisturbed: Job, victim: int, number: int
) -> None:
    codes = job.run("swept", 2, number=number, victim=victim, keep=1)
    assert codes[victim] == -9, job.text()
    assert codes[1 - victim] != 0
    whole = [name for name in job.names() if name.startswith("step-")]
    assert whole, (job.folder / f"checkpoints-operations-{victim}").read_text()
    job.done("dropout", 2)
    assert same(job.final(), undisturbed.final())
    assert "is damaged" not in job.text()
    assert job.events("restored")[0]["path"].endswith(whole[-1])
    assert all(name.startswith("step-") for name in job.names())  # what was unfinished is gone


def test_f39_training_killed_between_saves_repeats_the_steps_since_the_last_save(
    job: Job, undisturbed: Job
) -> None:
    assert job.run("dropout", 2, stop_at=11, fault="kill") == [-9, -9]
    job.done("dropout", 2)
    assert same(job.final(), undisturbed.final())
    assert job.samples() == undisturbed.samples()


@pytest.mark.parametrize(("victim", "lost"), [(0, "__0_0.distcp"), (1, "__1_0.distcp"), (0, ".metadata")])
def test_f68_checkpoint_with_a_file_lost_during_the_save_is_not_committed(
    job: Job, undisturbed: Job, victim: int, lost: str
) -> None:
    job.done("lossy", 2, victim=victim, lost=lost)
    assert [item["step"] for item in job.events("checkpoint")] == [4, 12, 16, 20, 21]
    assert [item["step"] for item in job.events("checkpoint_failed")] == [8]
    assert lost in job.events("checkpoint_failed")[0]["problem"]
    assert same(job.final(), undisturbed.final())
    assert not any(".writing" in name for name in job.names())


def test_f68_empty_index_fails_the_save_on_all_ranks(job: Job, undisturbed: Job) -> None:
    job.done("lossy", 2, victim=0, lost=".metadata", emptied=True)
    assert [item["step"] for item in job.events("checkpoint")] == [4, 12, 16, 20, 21]
    assert [item["step"] for item in job.events("checkpoint_failed")] == [8]
    assert same(job.final(), undisturbed.final())


def truncate_file(checkpoint: Path) -> None:
    path = checkpoint / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip_byte(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete_file(checkpoint: Path) -> None:
    (checkpoint / "__1_0.distcp").unlink()


def delete_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def truncate_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[:-20])


def zero_file(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "spoil", [truncate_file, flip_byte, delete_file, delete_manifest, truncate_manifest, zero_file]
)
def test_f68_f69_damaged_newest_checkpoint_is_skipped(
    job: Job, undisturbed: Job, spoil: Callable[[Path], None]
) -> None:
    assert job.run("dropout", 2, stop_at=15, fault="kill") == [-9, -9]
    newest = job.checkpoints / [name for name in job.names() if name.startswith("step-")][-1]
    spoil(newest)
    job.done("dropout", 2)
    assert f"{newest} is damaged" in job.text()
    assert f"{newest.name}.corrupt" in job.names()
    [event] = job.events("checkpoint_corrupt")
    assert event["problem"]
    assert job.events("restored")[0]["step"] < int(newest.name[5:13])
    assert same(job.final(), undisturbed.final())


def test_training_does_not_restart_from_zero_when_every_checkpoint_is_damaged(
    job: Job, undisturbed: Job
) -> None:
    assert job.run("dropout", 2, stop_at=11, fault="kill") == [-9, -9]
    spoilt = [name for name in job.names() if name.startswith("step-")]
    for name in spoilt:
        for path in (job.checkpoints / name).iterdir():
            path.write_bytes(b"")
    for _ in range(2):  # also when they have been set aside already
        assert 0 not in job.run("dropout", 2)
        assert f"no checkpoint in {job.checkpoints} is intact" in job.text()
    assert job.events("restored") == []
    assert sorted(job.names()) == sorted(f"{name}.corrupt" for name in spoilt)
    for name in job.names():
        shutil.rmtree(job.checkpoints / name)
    assert 0 not in job.run("dropout", 2)
    assert re.search(rf"{job.checkpoints} has no checkpoint, although this run saved \d there", job.text())
    (job.folder / "events.jsonl").unlink()
    job.done("dropout", 2)
    assert same(job.final(), undisturbed.final())


@pytest.mark.parametrize("victim", [0, 1])
def test_temporarily_unreadable_checkpoint_is_restored(job: Job, undisturbed: Job, victim: int) -> None:
    assert job.run("dropout", 2, stop_at=15, fault="kill") == [-9, -9]
    job.done("unreadable", 2, victim=victim, times=3)
    assert "cannot be read at the moment: [Errno 116] Stale file handle" in job.text()
    assert job.events("restored")[0]["step"] >= 8
    assert same(job.final(), undisturbed.final())
    assert not [name for name in job.names() if "corrupt" in name]


@pytest.mark.parametrize("victim", [0, 1])
def test_unreadable_checkpoint_is_kept_and_ends_training(job: Job, victim: int) -> None:
    assert job.run("dropout", 2, stop_at=15, fault="kill") == [-9, -9]
    before = [name for name in job.names() if name.startswith("step-")]
    assert 0 not in job.run("unreadable", 2, victim=victim, times=1_000_000, patience=1)
    assert f"{job.checkpoints / before[-1]} cannot be read" in job.text()
    assert "Stale file handle" in job.text()
    assert [name for name in job.names() if name.startswith("step-")] == before
    assert job.events("restored") == job.events("checkpoint_corrupt") == []


def test_checkpoint_of_a_later_version_is_kept_and_ends_training(job: Job) -> None:
    assert job.run("dropout", 2, stop_at=15, fault="kill") == [-9, -9]
    newest = job.checkpoints / [name for name in job.names() if name.startswith("step-")][-1]
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    assert 0 not in job.run("dropout", 2)
    assert f"{newest} was written by a later version of dtslurm" in job.text()
    assert newest.name in job.names()


def test_checkpoint_folder_that_cannot_be_listed_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(PermissionError):
        store.list_checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint_module, "READ_PATIENCE", 0.0)
    monkeypatch.setattr(checkpoint_module, "_READ_PAUSE", 0.0)
    with pytest.raises(train.CheckpointFailed, match="cannot be used"):
        train.Checkpointer(tmp_path).restore({})


def test_f69_checkpoint_files_are_synced_before_the_final_rename(job: Job) -> None:
    job.done("ordered", 1)
    log = json.loads((job.folder / "out-0" / "log.json").read_text())
    writing = log[-2].split()[1]
    assert log[-2:] == [f"rename {writing} step-00000003-a0", "sync checkpoints"]
    assert log[-4:-2] == ["sync manifest.json", f"sync {writing}"]
    files = {path.name for path in (job.checkpoints / "step-00000003-a0").iterdir()} - {"manifest.json"}
    last = {name: max(i for i, line in enumerate(log) if line == f"sync {name}") for name in files}
    assert max(last.values()) < log.index("sync manifest.json")


def test_training_continues_while_a_checkpoint_is_written(job: Job, undisturbed: Job) -> None:
    job.done("overlapping", 2)
    assert [(job.folder / "out-0" / f"waited-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    assert same(job.final(), undisturbed.final())


@pytest.fixture
def small_disk(job: Job) -> Iterator[Path]:
    with disks.small_disk(job.checkpoints, "size=1m") as folder:
        yield folder


@pytest.mark.parametrize("world", [1, 2])
def test_full_disk_leaves_the_old_checkpoint_intact_and_is_reported(
    job: Job, small_disk: Path, world: int
) -> None:
    job.done("full", world, tries=2, numbers=500_000)
    assert job.names() == ["step-00000001-a0", "step-00000009-a0"]
    assert [item["step"] for item in job.events("checkpoint_failed")] == [2, 3]
    assert "the checkpoint of step 2 was not written; the last good checkpoint is " in job.text()
    assert f" MiB are free in {small_disk}" in job.text()
    assert f"free disk space in {small_disk}" in job.text()


def test_three_failed_checkpoints_in_a_row_end_training(job: Job, small_disk: Path) -> None:
    assert job.run("full", 2, tries=3, numbers=500_000) == [1, 1]
    assert "3 consecutive checkpoints could not be written" in job.text()
    assert job.names() == ["step-00000001-a0"]


def test_f79_restored_event_records_the_duration_and_the_bytes_read(job: Job) -> None:
    job.done("exact", 1, epochs=1, steps=1)
    job.done("exact", 1, epochs=1, steps=1)
    (result,) = job.events("restored")
    newest = job.folder / "checkpoints" / Path(result["path"]).name
    assert result["seconds"] >= 0
    assert 0 < result["bytes"] <= sum(file.stat().st_size for file in newest.iterdir())


FSDP2 = pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="FSDP2 of a torch before 2.6 needs a GPU")


@pytest.mark.parametrize(
    "sharded", [pytest.param(False, id="ddp"), pytest.param(True, id="fsdp2", marks=FSDP2)]
)
def test_training_resumes_exactly_on_2_then_4_then_3_ranks(job: Job, tmp_path: Path, sharded: bool) -> None:
    alone = Job(job.zygote, tmp_path, tmp_path / "checkpoints")
    alone.done("exact", 1, epochs=3)
    job.done("exact", 2, epochs=3, steps=3, sharded=sharded)
    job.done("exact", 4, epochs=3, steps=3, sharded=sharded)
    job.done("exact", 3, epochs=3, sharded=sharded)
    assert [item["step"] for item in job.events("restored")] == [3, 6]
    assert same(job.final(), alone.final())
    for epoch, steps in job.samples().items():
        assert flat(steps) == list(range(48)), epoch


@FSDP2
def test_sharded_checkpoint_resumes_as_replicas_and_as_a_single_process(job: Job, tmp_path: Path) -> None:
    alone = Job(job.zygote, tmp_path, tmp_path / "checkpoints")
    alone.done("exact", 1)
    job.done("exact", 3, steps=3, sharded=True)
    job.done("exact", 2, steps=2)
    job.done("exact", 1)
    assert same(job.final(), alone.final())


def test_checkpoint_of_objects_with_other_shapes_is_refused_and_kept(job: Job) -> None:
    job.done("mismatched", 2, features=3)
    before = job.names()
    assert job.run("mismatched", 2, features=4) == [1, 1]
    assert "is intact, but does not match the objects to restore" in job.text()
    assert "the shape of net.weight is (1, 4) in the model and (1, 3) in the checkpoint" in job.text()
    assert job.names() == before
