"""Folders and files that are the user's alone, whatever the umask: caches, state and copies of runs."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are not there yet, each 0700.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    place = folder
    while not place.exists():
        missing.append(place)
        place = place.parent
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            made.mkdir(mode=0o700)


def make_own_folder(folder: Path) -> None:
    """Make a folder and those above it that are not there yet, each 0700; close one of the user's to others.

    Raises:
        PermissionError: it belongs to somebody else.
        OSError: it cannot be made.
    """
    make_folders(folder)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "this folder belongs to another user", str(folder))
    if found.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


def check_own_file(path: Path) -> None:
    """See that nobody else can have written a file, if it is there.

    Raises:
        PermissionError: it belongs to somebody else, or others may write to it.
    """
    with contextlib.suppress(FileNotFoundError):
        _check(path.lstat(), path)


def read_own_file(path: Path) -> bytes:
    """Return the content of a file that nobody else can have written.

    Raises:
        PermissionError: it belongs to somebody else, or others may write to it.
        OSError: it cannot be read, or is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(os.fstat(descriptor), path)
        return file.read()


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "others can write to this file", str(path))
