"""A folder of checkpoints: which entries count, how damage is found, and names that are taken."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtslurm.train import folder as store
from dtslurm.train.folder import CheckpointFile, Manifest


def write_checkpoint(folder: Path, step: int, text: str = "weights", attempt: int = 0) -> Path:
    """Commit a checkpoint of one file, and return its path."""
    writing = folder / f".writing-{store.name_of(step, attempt)}-0123"
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_text(text)
    saved = store.checksum(writing / "__0_0.distcp", sync=True)
    return store.commit(writing, Manifest(step, attempt, 1, (saved,), 5.0))


def entry_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 7, attempt=2)
    assert path.name == "step-00000007-a2"
    (file,) = (result := Manifest.read(path)).files
    assert (result.step, result.attempt, result.world_size, result.time) == (7, 2, 1, 5.0)
    assert (file.name, file.size) == ("__0_0.distcp", 7)
    assert store.find_damage(path, result.files) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "manifest.json is not a manifest: TypeError"),
        ("null", "manifest.json is not a manifest: AttributeError"),
        ("{}", "manifest.json is not a manifest: KeyError('schema')"),
        ('{"schema": 1, "files": {"a": 3}}', "manifest.json is not a manifest: TypeError"),
        ('{"schema": 1, "files": {}, "colour": "red"}', "manifest.json is not a manifest: TypeError"),
        ('{"schema": 1, "files": {"a": {"bytes": "many", "sha256": ""}}}', "many"),
        ('{"schema": 1, "fil', "Unterminated string"),
    ],
)
def test_invalid_manifest_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r".") as error:
        Manifest.read(tmp_path)
    assert words in str(error.value)


def test_manifest_of_a_later_schema_is_not_reported_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 2, "files": {}}')
    with pytest.raises(store.LaterVersion, match="has schema 2, and this version reads schema 1"):
        Manifest.read(tmp_path)


def test_unreadable_checkpoint_file_is_not_reported_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, 1)
    files = Manifest.read(path).files

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(store, "checksum", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        store.find_damage(path, files)


def test_checkpoints_are_listed_by_step_then_attempt_latest_first(tmp_path: Path) -> None:
    assert store.list_checkpoints(tmp_path / "not there") == []
    for name in ("step-00000009-a0", "step-00000010-a0", "step-00000010-a11", "step-00000010-a2"):
        (tmp_path / name).mkdir()
    for name in ("step-00000099-a0.corrupt", ".writing-step-00000099-a0-00", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000100-a0").touch()  # no folder
    names = [path.name for path in store.list_checkpoints(tmp_path)]
    assert names == ["step-00000010-a11", "step-00000010-a2", "step-00000010-a0", "step-00000009-a0"]


def test_damage_of_a_checkpoint_file_is_described(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    files = Manifest.read(path).files
    (path / "__0_0.distcp").write_text("Weights")
    assert (
        store.find_damage(path, files) == "__0_0.distcp has changed since it was written: its SHA-256 differs"
    )
    (path / "__0_0.distcp").write_text("weight")
    assert store.find_damage(path, files) == "__0_0.distcp has 6 of 7 bytes"
    (path / "__0_0.distcp").unlink()
    assert store.find_damage(path, files) == "__0_0.distcp is missing"


def delay_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[float]:
    """Have a file appear at the third look at it; return how long each wait for it was."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            path.write_text("weights")

    monkeypatch.setattr("dtslurm.train.folder.time.sleep", wait)
    return waits


def test_file_of_another_node_may_appear_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path, 1)
    files = Manifest.read(path).files
    (path / "__0_0.distcp").unlink()
    waits = delay_file(monkeypatch, path / "__0_0.distcp")
    assert store.find_damage(path, files, timeout_s=60) == ""
    assert len(waits) == 2
    (path / "__0_0.distcp").write_text("wei")
    waits.clear()
    store.wait_for_file(path / "__0_0.distcp", 7)
    assert len(waits) == 2


def test_file_of_another_rank_that_never_appears_ends_the_save(tmp_path: Path) -> None:
    writing = tmp_path / ".writing-step-00000001-a0-00"
    writing.mkdir()
    with pytest.raises(FileNotFoundError, match="all nodes must share the folder"):
        store.wait_for_file(writing / "__1_0.distcp", 7, timeout_s=-1)
    assert entry_names(tmp_path) == [writing.name]


def test_checkpoint_of_the_same_step_from_an_earlier_start_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3, "old")
    path = write_checkpoint(tmp_path, 3, "new")
    assert entry_names(tmp_path) == ["step-00000003-a0"]
    assert (path / "__0_0.distcp").read_text() == "new"
    assert store.find_damage(path, Manifest.read(path).files) == ""


def test_set_aside_checkpoints_get_unique_names(tmp_path: Path) -> None:
    texts = ("one", "two", "three")
    names = [store.set_aside(write_checkpoint(tmp_path, 3, text), "corrupt").name for text in texts]
    assert names == [f"step-00000003-a0.corrupt{more}" for more in ("", "-1", "-2")]
    assert (tmp_path / names[1] / "__0_0.distcp").read_text() == "two"
    assert store.list_checkpoints(tmp_path) == []
    gone = tmp_path / "step-00000009-a0"
    assert store.set_aside(gone, "corrupt").name == f"{gone.name}.corrupt"  # another process was first


def test_set_aside_fails_after_too_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    with pytest.raises(FileExistsError, match="1000 checkpoints have this name"):
        store.set_aside(tmp_path / "step-00000003-a0", "corrupt")


def test_prune_deletes_old_checkpoints_except_pinned_checkpoints(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step) for step in range(1, 6)]
    store.prune(tmp_path, None)
    assert len(entry_names(tmp_path)) == 5
    store.prune(tmp_path, 2, frozenset({paths[0]}))
    assert entry_names(tmp_path) == [paths[0].name, paths[3].name, paths[4].name]


def test_sweep_deletes_only_unfinished_writes_of_earlier_attempts(tmp_path: Path) -> None:
    store.sweep(tmp_path / "not there", 3)
    kept = {".writing-step-00000001-a4-0a", "step-00000001-a0", ".writing-of-another", "notes"}
    for name in (*kept, ".writing-step-00000001-a3-0a", ".writing-step-00000001-a0-ff", ".deleting-step-1"):
        (tmp_path / name).mkdir()
    store.sweep(tmp_path, 3)
    assert set(entry_names(tmp_path)) == kept


def test_artifact_record_has_a_size_and_a_checksum_that_depends_on_every_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 3)
    artifact = store.describe_artifact(path, 3)
    size = (path / "manifest.json").stat().st_size
    assert (artifact["path"], artifact["kind"], artifact["step"]) == (str(path), "checkpoint", 3)
    assert (artifact["files"], artifact["bytes"]) == (2, 7 + size)
    shutil.rmtree(path)
    other = store.describe_artifact(write_checkpoint(tmp_path, 3, "Weights"), 3)
    assert other["sha256"] != artifact["sha256"]


def test_manifest_lists_each_file_with_its_checksum(tmp_path: Path) -> None:
    text = Manifest(1, 0, 2, (CheckpointFile("a", 1, "00"), CheckpointFile("b", 2, "01"))).text()
    values = json.loads(text)
    assert values["schema"] == 1
    assert values["files"] == {"a": {"bytes": 1, "sha256": "00"}, "b": {"bytes": 2, "sha256": "01"}}
