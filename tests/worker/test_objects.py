"""The store of file contents: what becomes an object, what is trusted, and how runs get it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.delivery import objects as store
from dtslurm.worker.delivery.objects import DIGEST_LENGTH, STAMP, Objects
from dtslurm.worker.lib.disk import WorkerError

CODE, TOOL = b"print(1)\n", b"#!/bin/sh\n"
USER = os.geteuid()


def key(data: bytes, executable: bool = False) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH] + ("x" if executable else "")


NAME = key(CODE)


def opened(folder: Path) -> Objects:
    """Return the store as another program finds it."""
    return Objects(os.fsencode(folder / "objects"))


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    """An empty store."""
    result = opened(tmp_path)
    result.prepare()
    return result


@pytest.fixture
def stored(objects: Objects) -> Objects:
    """A store with an object."""
    objects.add(NAME, [CODE])
    objects.settle()
    return objects


def file_of(objects: Objects, name: str) -> Path:
    return Path(os.fsdecode(objects.path(name)))


def unfinished(objects: Objects) -> list[Path]:
    return list(Path(os.fsdecode(objects.folder), "tmp").iterdir())


def refuse_to_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed() -> None:
        raise AssertionError("the content is read again")

    monkeypatch.setattr(hashlib, "sha256", hashed)


# ---- What becomes an object ----


@pytest.mark.parametrize(("executable", "mode"), [(False, 0o400), (True, 0o500)])
def test_object_is_read_only_and_has_the_common_time(objects: Objects, executable: bool, mode: int) -> None:
    name = key(TOOL, executable)
    objects.add(name, [TOOL[:4], TOOL[4:]])
    assert not objects.has(name, len(TOOL))
    objects.settle()
    assert objects.has(name, len(TOOL))
    status = file_of(objects, name).stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (mode, STAMP)
    assert file_of(objects, name).read_bytes() == TOOL
    assert unfinished(objects) == []


@pytest.mark.parametrize(("name", "is_known"), [(NAME, True), (NAME[:-1], False), ("../../etc", False)])
def test_content_that_does_not_match_its_name_becomes_no_object(
    objects: Objects, name: str, is_known: bool
) -> None:
    with pytest.raises(WorkerError) as refused:
        objects.add(name, [TOOL])
    reason = (
        f"the content of object {name} does not match its checksum"
        if is_known
        else f"'{name}' is not an object"
    )
    assert (refused.value.key, refused.value.value) == ("refused", reason)
    assert unfinished(objects) == []
    objects.settle()
    assert not objects.has(name, len(TOOL))


@pytest.mark.parametrize(
    ("limit", "value", "counts"),
    [
        ("BATCH_FILES", 2, [0, 2, 2, 4]),
        ("BATCH_BYTES", 5, [0, 0, 3, 3, 3, 6]),
        ("BATCH_BYTES", 4, [0, 2, 2, 4]),
        ("BATCH_BYTES", 1, [1, 2]),
    ],
)
def test_objects_are_kept_in_batches(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, counts: list[int]
) -> None:
    monkeypatch.setattr(store, limit, value)
    contents = [f"{number:02}".encode() for number in range(len(counts))]
    for number, count in enumerate(counts):
        objects.add(key(contents[number]), [contents[number]])
        assert sum(objects.has(key(content), 2) for content in contents) == count


def test_batch_that_cannot_be_written_is_lost_without_a_trace(
    stored: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    stored.add(key(TOOL), [TOOL])
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fail)
        with pytest.raises(WorkerError) as refused:
            stored.settle()
    assert (refused.value.key, refused.value.value["verb"]) == ("disk", "write")
    assert refused.value.value["path"] == str(file_of(stored, key(TOOL)))
    assert unfinished(stored) == []
    stored.settle()
    assert (stored.has(NAME, len(CODE)), stored.has(key(TOOL), len(TOOL))) == (True, False)


def test_first_object_of_a_content_stays(stored: Objects) -> None:
    inode = file_of(stored, NAME).stat().st_ino
    stored.add(NAME, [CODE])
    stored.settle()
    assert file_of(stored, NAME).stat().st_ino == inode
    assert unfinished(stored) == []


# ---- What is trusted ----


def write_to(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


def write_and_reset_time(path: Path, data: bytes = b"print(9)\n") -> None:
    write_to(path, data)
    os.utime(path, (STAMP, STAMP))


def link_elsewhere(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


HARMS: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "written to": lambda path: write_to(path, CODE),  # no change, but nobody knows
    "written to, time reset": write_and_reset_time,
    "shorter, time reset": lambda path: write_and_reset_time(path, CODE[1:]),
    "a link": link_elsewhere,
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_changed_object_is_noticed_and_replaced(
    stored: Objects, tmp_path: Path, harm: str, is_sealed: bool
) -> None:
    if is_sealed:
        stored.write_seals()
    path = file_of(stored, NAME)
    HARMS[harm](path)
    later = opened(tmp_path)
    assert not later.has(NAME, len(CODE))
    assert later.link(NAME, os.fsencode(tmp_path / "code"), len(CODE), b"code") is False
    assert not store.copy(later, NAME, len(CODE), os.fsencode(tmp_path / "code"), b"code")
    assert not (tmp_path / "code").exists()
    later.add(NAME, [CODE])
    later.settle()
    assert later.has(NAME, len(CODE))
    assert path.read_bytes() == CODE


def test_sealed_object_is_not_read_again(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.write_seals()
    assert (tmp_path / "objects/seals").stat().st_mode & 0o777 == 0o400
    assert unfinished(stored) == []
    refuse_to_hash(monkeypatch)
    assert opened(tmp_path).has(NAME, len(CODE))


def test_object_whose_seal_was_lost_is_read_once(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = opened(tmp_path)
    assert later.has(NAME, len(CODE))
    refuse_to_hash(monkeypatch)
    assert later.has(NAME, len(CODE))


def test_object_is_found_below_an_open_folder(stored: Objects, tmp_path: Path) -> None:
    path = file_of(stored, NAME)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        status, later = path.stat(), opened(tmp_path)
        assert not later.is_genuine(NAME, len(CODE), status, b"another name", folder)
        assert later.is_genuine(NAME, len(CODE), status, os.fsencode(path.name), folder)
    finally:
        os.close(folder)


@pytest.mark.parametrize(("most", "is_kept"), [(2, True), (1, False)])
def test_seals_of_earlier_objects_are_kept_up_to_a_limit(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, is_kept: bool
) -> None:
    monkeypatch.setattr(store, "MOST_SEALS", most)
    stored.write_seals()
    later = opened(tmp_path)
    later.has(NAME, len(CODE))  # reads the seals
    later.add(key(TOOL), [TOOL])
    later.settle()
    later.write_seals()
    assert set(json.loads((tmp_path / "objects/seals").read_text())) == {
        key(TOOL),
        *([NAME] if is_kept else []),
    }


def test_seals_are_written_only_if_an_object_was_verified(objects: Objects, tmp_path: Path) -> None:
    objects.write_seals()
    assert not (tmp_path / "objects/seals").exists()


def test_seals_that_cannot_be_written_are_no_error(stored: Objects, tmp_path: Path) -> None:
    (tmp_path / "objects/seals/in the way").mkdir(parents=True)
    stored.write_seals()
    assert unfinished(stored) == []
    assert opened(tmp_path).has(NAME, len(CODE))


# ---- How runs get it ----


def test_run_has_a_link_to_the_object_which_stays_sealed(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "code"
    assert stored.link(NAME, os.fsencode(target), len(CODE), b"code") is True
    assert target.stat().st_ino == file_of(stored, NAME).stat().st_ino
    refuse_to_hash(monkeypatch)
    assert stored.has(NAME, len(CODE))  # although a link changes the change time


@pytest.mark.parametrize(
    ("number", "result"),
    [
        (errno.EXDEV, None),
        (errno.EPERM, None),
        (errno.EOPNOTSUPP, None),
        (errno.EMLINK, False),
        (errno.ENOENT, False),
        (errno.ENOTDIR, False),
        (errno.EACCES, "disk"),
        (errno.ENOSPC, "disk"),
    ],
)
def test_object_that_cannot_be_linked_is_copied_unless_the_disk_fails(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, result: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    target = os.fsencode(tmp_path / "code")
    if result != "disk":
        assert stored.link(NAME, target, len(CODE), b"/final") is result
        return
    with pytest.raises(WorkerError) as refused:
        stored.link(NAME, target, len(CODE), b"/final")
    assert (refused.value.key, refused.value.value["path"]) == ("disk", "/final")
    assert refused.value.value["errno"] == number


def test_object_that_changes_while_it_is_linked_is_not_used(
    stored: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def write_first(source: bytes, target: bytes, *, follow_symlinks: bool) -> None:
        write_to(Path(os.fsdecode(source)), b"changed")
        link(source, target, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "link", write_first)
    assert stored.link(NAME, os.fsencode(tmp_path / "code"), len(CODE), b"code") is False
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize(("executable", "mode"), [(False, 0o400), (True, 0o500)])
def test_copy_of_an_object_is_as_the_object(
    objects: Objects, tmp_path: Path, executable: bool, mode: int
) -> None:
    objects.add(key(TOOL, executable), [TOOL])
    objects.settle()
    target = tmp_path / "tool"
    assert store.copy(objects, key(TOOL, executable), len(TOOL), os.fsencode(target), b"tool")
    status = target.stat()
    assert (target.read_bytes(), status.st_mode & 0o777, status.st_mtime) == (TOOL, mode, STAMP)
    assert status.st_nlink == 1


# ---- Its folder ----


@pytest.mark.parametrize(
    ("mode", "is_mine", "is_safe"),
    [
        (0o700, True, True),
        (0o755, True, True),
        (0o720, True, False),
        (0o702, True, False),
        (0o700, False, False),
    ],
)
def test_store_into_which_other_users_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_mine: bool, is_safe: bool
) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects").chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: USER if is_mine else USER + 1)
    if is_safe:
        opened(tmp_path).prepare()
        return
    with pytest.raises(WorkerError) as refused:
        opened(tmp_path).prepare()
    assert refused.value.value == f"other users can write to {tmp_path / 'objects'}"


@pytest.mark.parametrize(
    ("existing", "user", "suffix"),
    [
        ([""], USER, ""),
        ([], USER, ""),
        ([""], USER + 1, f"-{USER + 1}"),
        (["", f"-{USER}"], USER, f"-{USER}"),
        ([f"-{USER}"], USER, f"-{USER}"),
    ],
)
def test_users_who_share_a_folder_of_runs_have_stores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: list[str], user: int, suffix: str
) -> None:
    for name in existing:
        (tmp_path / f"objects{name}").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    folder = os.fsencode(tmp_path / "objects")
    assert store.choose_objects_folder(folder) == folder + suffix.encode()


@pytest.mark.parametrize(
    ("space", "is_full"), [({"free": 30}, False), ({"free": 29}, True), ({"trouble": "unknown"}, False)]
)
def test_full_disk_is_reported_before_anything_is_sent(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, space: dict[str, Any], is_full: bool
) -> None:
    monkeypatch.setattr(store, "room", lambda _path: space)
    missing = {"a": 10, "b": 20}
    if not is_full:
        store.lack_of_room(objects, missing)
        return
    with pytest.raises(WorkerError) as refused:
        store.lack_of_room(objects, missing)
    assert (refused.value.key, refused.value.value["errno"]) == ("disk", errno.ENOSPC)
