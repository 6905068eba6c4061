"""A cache of file digests, so that an unchanged tree is not read again."""

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
# A file that changes twice within one step of the file system's clock can look unchanged. The coarsest step
# is 2 s (FAT).
_RACY_NS = 2_000_000_000
_STALE_S = 90 * 86400
_STALE_SHARE = 0.1  # share of outdated entries above which the file is rewritten

Stamp = tuple[int, int, int, int]


def stamp(status: os.stat_result) -> Stamp:
    """Return the attributes that change with a file's content: size, mtime_ns, inode, ctime_ns."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


class HashCache:
    """The digests of one tree's files, in one file of the folder ``cache``.

    Several processes may use it: each writes a new file and renames it, so the last one wins. The entries of
    the other processes are then recomputed. A damaged or unwritable cache costs only time.
    """

    def __init__(self, cache: Path, root: Path) -> None:
        self._root = str(root)
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self._path = cache / f"{name}.json"
        self._loaded = self._load()
        self._used: dict[str, list[int | str]] = {}
        self._has_new_entries = False

    def _load(self) -> Mapping[str, Any]:
        try:
            document = json.loads(read_own_file(self._path))
            if (
                document["schema"] == _SCHEMA
                and document["root"] == self._root
                and isinstance(document["files"], dict)
            ):
                return dict(document["files"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return {}

    def get(self, path: str, now: Stamp) -> str | None:
        """Return the digest of an unchanged file, None if the file must be read."""
        entry = self._loaded.get(path)
        if not isinstance(entry, list) or len(entry) != 5 or tuple(entry[:4]) != now:
            return None
        self._used[path] = entry
        return str(entry[4])

    def put(self, path: str, now: Stamp, digest: str, read_at_ns: int) -> None:
        """Store the digest of a file read at ``read_at_ns``, unless the file changed within `_RACY_NS` before
        that.
        """
        if max(now[1], now[3]) + _RACY_NS < read_at_ns:
            self._used[path] = [*now, digest]
            self._has_new_entries = True

    def save(self) -> None:
        """Write the entries used by this process, if there are new ones or more than 10% of the old ones are
        outdated.
        """
        if (
            not self._has_new_entries
            and len(self._loaded) - len(self._used) <= len(self._loaded) * _STALE_SHARE
        ):
            return
        document = {"schema": _SCHEMA, "root": self._root, "files": self._used}
        text = json.dumps(document, separators=(",", ":"))
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            write_beside(self._path, text.encode("ascii"))
            for stale_path in self._path.parent.glob("*.json"):
                if stale_path.stat().st_mtime < self._path.stat().st_mtime - _STALE_S:
                    remove(stale_path, within=self._path.parent)


def write_beside(path: Path, data: bytes) -> None:
    """Replace a cache file atomically, without fsync: it need not survive a power failure."""
    temp_path = path.with_name(f".{os.urandom(8).hex()}")
    fd = os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        temp_path.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temp_path, within=path.parent)
        raise
