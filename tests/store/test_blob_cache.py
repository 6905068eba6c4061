"""The blob cache: blobs may be lost but are never wrong."""

from __future__ import annotations

import os
from pathlib import Path

from dtslurm.store.blob_cache import BlobCache


def test_a_stored_blob_is_returned(tmp_path: Path) -> None:
    blob_cache = BlobCache(tmp_path / "a" / "b")
    assert blob_cache.get("x") is None
    blob_cache.put("x", b"1")
    blob_cache.put("x", b"")
    assert blob_cache.get("x") == b""
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_damaged_and_foreign_blobs_are_ignored(tmp_path: Path) -> None:
    blob_cache = BlobCache(tmp_path)
    blob_cache.put("x", b"12345")
    data = (tmp_path / "x").read_bytes()
    for broken in (b"", data[:-1], data[:-1] + b"6"):
        (tmp_path / "x").write_bytes(broken)
        assert blob_cache.get("x") is None
    (tmp_path / "x").write_bytes(data)
    assert blob_cache.get("x") == b"12345"
    (tmp_path / "x").chmod(0o620)
    assert blob_cache.get("x") is None


def test_an_unwritable_cache_folder_causes_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blob_cache = BlobCache(tmp_path / "file" / "folder")
    blob_cache.put("x", b"1")
    assert blob_cache.get("x") is None


def test_old_blobs_are_removed(tmp_path: Path) -> None:
    blob_cache = BlobCache(tmp_path)
    for name in ("old", "new"):
        blob_cache.put(name, b"1")
    os.utime(tmp_path / "old", (1, 1))
    blob_cache.put("x", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x"]
