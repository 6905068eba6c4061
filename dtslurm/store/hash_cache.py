"""Remembers the digests of files, so that an unchanged tree is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.transport.deletion import remove

_SCHEMA = 1
# A file changed twice within its clock's step can look unchanged; 2 s is the step of the coarsest (FAT).
_RACY_NS = 2_000_000_000
_STALE_S = 90 * 86400
_STALE_SHARE = 0.1  # of the entries; they do no harm

Stamp = tuple[int, int, int, int]


def stamp(found: os.stat_result) -> Stamp:
    """Return what changes when a file's content does: size, mtime_ns, inode, ctime_ns."""
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns


class HashCache:
    """The digests of one tree's files, in one file of the folder ``cache``.

    Several processes may use it: each writes a whole file beside it and renames it; the last wins, and what
    the others knew is read from the files again. A broken or unwritable cache only costs time.
    """

    def __init__(self, cache: Path, root: Path) -> None:
        self._root = str(root)
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self._path = cache / f"{name}.json"
        self._known = self._load()
        self._used: dict[str, list[int | str]] = {}
        self._news = False

    def _load(self) -> Mapping[str, Any]:
        try:
            found = json.loads(read_own_file(self._path))
            if (
                found["schema"] == _SCHEMA
                and found["root"] == self._root
                and isinstance(found["files"], dict)
            ):
                return dict(found["files"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return {}

    def get(self, path: str, now: Stamp) -> str | None:
        """Return the digest of a file that is as it was, None if it must be read."""
        entry = self._known.get(path)
        if not isinstance(entry, list) or len(entry) != 5 or tuple(entry[:4]) != now:
            return None
        self._used[path] = entry
        return str(entry[4])

    def put(self, path: str, now: Stamp, digest: str, read_at_ns: int) -> None:
        """Remember a file read at ``read_at_ns``, unless it was changed too shortly before."""
        if max(now[1], now[3]) + _RACY_NS < read_at_ns:
            self._used[path] = [*now, digest]
            self._news = True

    def save(self) -> None:
        """Write what this run used, if there is news, or much of what was known is not true any more."""
        if not self._news and len(self._known) - len(self._used) <= len(self._known) * _STALE_SHARE:
            return
        document = {"schema": _SCHEMA, "root": self._root, "files": self._used}
        text = json.dumps(document, separators=(",", ":"))
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            write_beside(self._path, text.encode("ascii"))
            for old in self._path.parent.glob("*.json"):
                if old.stat().st_mtime < self._path.stat().st_mtime - _STALE_S:
                    remove(old, within=self._path.parent)


def write_beside(path: Path, data: bytes) -> None:
    """Write a cache file whole or not at all; it need not outlive a power cut."""
    temp = path.with_name(f".{os.urandom(8).hex()}")
    handle = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temp, within=path.parent)
        raise
