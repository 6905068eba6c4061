"""A disk's refusals in words that tell a person what to do, the same for this machine and a far one."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dtslurm.errors import StoreError

_WORDS = {
    errno.EROFS: ("the file system is read-only", "choose a run folder on a file system you may write to"),
    errno.EACCES: ("permission denied", "check who owns the folder, and its mode (ls -ld)"),
    errno.EPERM: ("operation not permitted", "check who owns the folder, and its attributes"),
    errno.ENOENT: ("there is no such file or folder", ""),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another folder"),
    errno.EISDIR: ("it is a folder, not a file", "choose another name"),
    errno.ENAMETOOLONG: ("the path, or a name in it, is too long", "choose a shorter name or folder"),
    errno.ELOOP: ("its symbolic links lead in a circle", "mend the links"),
    errno.ESTALE: ("the network file system lost the file (stale handle)", "try again"),
}


def store_error(
    error: OSError, path: str | Path, verb: str, room: Mapping[str, object] | None = None
) -> StoreError:
    """Return the error to raise when ``path`` could not be read or written (``verb``).

    ``room`` is what the machine that refused said of its file system (`dtslurm.worker.disk.room`); left
    out, this machine's is asked when it matters.
    """
    evidence = [str(error)]
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if room is None:
            from dtslurm.worker import disk

            room = disk.room(os.fsencode(path))
        evidence.append(_space(room))
    if error.errno == errno.ENOSPC:
        return StoreError(
            f"disk full: cannot {verb} {path}",
            evidence=evidence,
            hint="free some space there, or choose a run folder on another file system",
        )
    if error.errno == errno.EDQUOT:
        return StoreError(
            f"quota exceeded: cannot {verb} {path}",
            evidence=evidence,
            hint="delete files of yours there (see quota -s, on Lustre lfs quota), or choose another folder",
        )
    words, hint = _WORDS.get(error.errno or 0, (error.strerror or str(error), ""))
    return StoreError(f"cannot {verb} {path}: {words}", evidence=evidence, hint=hint)


def _space(room: Mapping[str, object]) -> str:
    """Name the file system and what is left there."""
    if "trouble" in room:
        return f"its file system cannot be examined: {room['trouble']}"
    files = f", {room['files_free']} of {room['files']} files" if room["files"] else ""
    return f"file system {room['mount']}: {size(room['free'])} of {size(room['total'])} free{files}"


def size(amount: object) -> str:
    """Return a number of bytes as people read it: ``512 B``, ``31 MiB``, ``1.5 TiB``."""
    value = float(str(amount))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
