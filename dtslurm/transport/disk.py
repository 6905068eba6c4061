"""A disk's refusals in words that tell a person what to do, wherever the disk is."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

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
        return f"file system {self.mount}: {_size(self.free)} of {_size(self.total)} free{files}"


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


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
