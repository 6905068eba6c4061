"""Errors of the file system, local or remote, as messages with a hint for the user."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import format_bytes
from dtslurm.worker.lib import disk as worker_disk

_MESSAGES_BY_ERRNO = {
    errno.EROFS: ("the file system is read-only", "choose a run root on a file system that you can write to"),
    errno.EACCES: ("permission denied", "check the owner and the mode of the folder (ls -ld)"),
    errno.EPERM: ("operation not permitted", "check the owner and the attributes of the folder"),
    errno.ENOENT: ("no such file or folder", ""),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another folder"),
    errno.EISDIR: ("it is a folder, not a file", "choose another name"),
    errno.ENAMETOOLONG: ("the path, or a name in it, is too long", "choose a shorter name or folder"),
    errno.ELOOP: ("its symbolic links form a loop", "fix the links"),
    errno.ESTALE: ("the network file system lost the file (stale handle)", "try again"),
}

_ERRNO_BY_MESSAGE = {
    os.strerror(number): number
    for number in (
        *_MESSAGES_BY_ERRNO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EFBIG,
        errno.ETXTBSY,
        errno.EBUSY,
    )
} | {
    "Disc quota exceeded": errno.EDQUOT,
    "Stale NFS file handle": errno.ESTALE,
}


@dataclass(frozen=True)
class Room:
    """The free space of the file system mounted at ``mount``.

    Attributes:
        free: free bytes.
        total: total bytes.
        files_free: free inodes, 0 if the file system does not count them.
        files: total inodes, 0 if the file system does not count them.
    """

    mount: str
    free: int
    total: int
    files_free: int = 0
    files: int = 0

    def __str__(self) -> str:
        files = f", {self.files_free} of {self.files} files" if self.files else ""
        return (
            f"file system {self.mount}: {format_bytes(self.free)} of {format_bytes(self.total)} free{files}"
        )


def refusal(
    number: int, error_text: str, path: str, verb: str, *, free_space: str, host: str = ""
) -> StoreError:
    """Return the error to raise when ``path`` could not be read or written.

    Args:
        number: the ``errno``; 0 if unknown.
        error_text: the system's error message, used as evidence.
        path: the file that was to be read or written.
        verb: ``read`` or ``write``.
        free_space: the free space of its file system, for a full disk or quota.
        host: the host, unless it is this machine.
    """
    location = f"{host}:{path}" if host else path
    if number == errno.ENOSPC:
        return StoreError(
            f"disk full: cannot {verb} {location}",
            evidence=[error_text, free_space],
            hint="free space in this file system, or choose a run root on another file system",
        )
    if number == errno.EDQUOT:
        return StoreError(
            f"quota exceeded: cannot {verb} {location}",
            evidence=[error_text, free_space],
            hint="delete your files in this file system (see quota -s, on Lustre lfs quota), or choose "
            "another folder",
        )
    problem, hint = _MESSAGES_BY_ERRNO.get(number, (os.strerror(number) if number else error_text, ""))
    return StoreError(f"cannot {verb} {location}: {problem}", evidence=[error_text], hint=hint)


def store_error(
    error: OSError, path: str | Path, verb: str, room_values: Mapping[str, object] | None = None
) -> StoreError:
    """Return the error to raise for an ``OSError`` of the file system.

    ``room_values`` is what `dtslurm.worker.lib.disk.room` returned on the machine of the error. If None, this
    machine's free space is read when the disk or quota is full.
    """
    number = error.errno or 0
    free_space = ""
    if is_full(number):
        free_space = _describe_free_space(
            worker_disk.room(os.fsencode(path)) if room_values is None else room_values
        )
    return refusal(number, str(error), str(path), verb, free_space=free_space)


def _describe_free_space(room_values: Mapping[str, object]) -> str:
    if "trouble" in room_values:
        return f"its file system cannot be examined: {room_values['trouble']}"
    numbers = (int(str(room_values[key])) for key in ("free", "total", "files_free", "files"))
    return str(Room(str(room_values["mount"]), *numbers))


def number_of(text: str) -> int:
    """Return the ``errno`` of the error message that ends a line of a program's output, 0 if none matches."""
    for line in text.splitlines():
        for message, number in _ERRNO_BY_MESSAGE.items():
            if line.rstrip().endswith(message):
                return number
    return 0


def is_full(number: int) -> bool:
    """Whether the disk or the user's quota is full."""
    return number in {errno.ENOSPC, errno.EDQUOT}


def room_of(blocks: str, inodes: str) -> str:
    """Describe the free space of a folder from the output of ``df -Pk`` and ``df -Pi``."""
    try:
        _, kib_total, _, kib_free, _, mount = blocks.splitlines()[-1].split(None, 5)
        space = Room(mount, int(kib_free) * 1024, int(kib_total) * 1024)
    except (IndexError, ValueError):
        return "its file system cannot be examined"
    try:
        _, inodes_total, _, inodes_free, _, _ = inodes.splitlines()[-1].split(None, 5)
        space = Room(mount, space.free, space.total, int(inodes_free), int(inodes_total))
    except (IndexError, ValueError):  # not every file system counts inodes
        pass
    return str(space)
