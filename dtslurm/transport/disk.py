"""A disk's refusals in words that tell a person what to do, wherever the disk is."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.values import dataclass
from dtslurm.worker.lib import disk as worker_disk

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

_NUMBERS = {
    os.strerror(number): number
    for number in (*_WORDS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ETXTBSY, errno.EBUSY)
} | {
    "Disc quota exceeded": errno.EDQUOT,
    "Stale NFS file handle": errno.ESTALE,
}


@dataclass(frozen=True)
class Room:
    """What is left on the file system mounted at ``mount``: bytes, and files where it counts them."""

    mount: str
    free: int
    total: int
    files_free: int = 0
    files: int = 0

    def __str__(self) -> str:
        files = f", {self.files_free} of {self.files} files" if self.files else ""
        return f"file system {self.mount}: {size(self.free)} of {size(self.total)} free{files}"


def refusal(number: int, said: str, path: str, verb: str, *, room: str, where: str = "") -> StoreError:
    """Return the error to raise when ``path`` could not be read or written.

    Args:
        number: the ``errno``; 0 if unknown.
        said: the system's words, the evidence.
        path: the file asked for.
        verb: ``read`` or ``write``.
        room: what is left on its file system, for a disk or quota that is full.
        where: the host, unless it is this machine.
    """
    place = f"{where}:{path}" if where else path
    if number == errno.ENOSPC:
        return StoreError(
            f"disk full: cannot {verb} {place}",
            evidence=[said, room],
            hint="free some space there, or choose a run folder on another file system",
        )
    if number == errno.EDQUOT:
        return StoreError(
            f"quota exceeded: cannot {verb} {place}",
            evidence=[said, room],
            hint="delete files of yours there (see quota -s, on Lustre lfs quota), or choose another folder",
        )
    words, hint = _WORDS.get(number, (os.strerror(number) if number else said, ""))
    return StoreError(f"cannot {verb} {place}: {words}", evidence=[said], hint=hint)


def store_error(
    error: OSError, path: str | Path, verb: str, room: Mapping[str, object] | None = None
) -> StoreError:
    """Return the error to raise for a system's refusal.

    ``room`` is what the machine that refused said of its file system (`dtslurm.worker.lib.disk.room`); left
    out, this machine's is asked when it matters.
    """
    number = error.errno or 0
    left = ""
    if is_full(number):
        left = _left(worker_disk.room(os.fsencode(path)) if room is None else room)
    return refusal(number, str(error), str(path), verb, room=left)


def _left(room: Mapping[str, object]) -> str:
    if "trouble" in room:
        return f"its file system cannot be examined: {room['trouble']}"
    numbers = (int(str(room[key])) for key in ("free", "total", "files_free", "files"))
    return str(Room(str(room["mount"]), *numbers))


def number_of(said: str) -> int:
    """Return the ``errno`` that a program's English complaint ends with, 0 if none is known."""
    for line in said.splitlines():
        for words, number in _NUMBERS.items():
            if line.rstrip().endswith(words):
                return number
    return 0


def is_full(number: int) -> bool:
    """Whether the disk or the user's share of it is full."""
    return number in {errno.ENOSPC, errno.EDQUOT}


def room_of(blocks: str, inodes: str) -> str:
    """Return what is left from what ``df -Pk`` and ``df -Pi`` printed for one folder."""
    try:
        _, size, _, free, _, mount = blocks.splitlines()[-1].split(None, 5)
        space = Room(mount, int(free) * 1024, int(size) * 1024)
    except (IndexError, ValueError):
        return "its file system cannot be examined"
    try:
        _, count, _, left, _, _ = inodes.splitlines()[-1].split(None, 5)
        space = Room(mount, space.free, space.total, int(left), int(count))
    except (IndexError, ValueError):  # not every file system counts files
        pass
    return str(space)


def size(amount: float) -> str:
    """Return a number of bytes as people read it: ``512 B``, ``31 MiB``, ``1.5 TiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
