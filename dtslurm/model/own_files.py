"""Folders and files that only the user can write, whatever the umask: caches, state and copies of runs."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, each with mode 0700.

    Raises:
        OSError: a folder cannot be created.
    """
    missing = []
    ancestor = folder
    while not ancestor.exists():
        missing.append(ancestor)
        ancestor = ancestor.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process created it first
            path.mkdir(mode=0o700)


def make_own_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700; make an existing one unwritable for others.

    Raises:
        PermissionError: the folder belongs to another user.
        OSError: the folder cannot be created.
    """
    make_folders(folder)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "this folder belongs to another user", str(folder))
    if status.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def check_own_file(path: Path) -> None:
    """Check that no other user can have written a file, if the file exists.

    Raises:
        PermissionError: the file belongs to another user, or others may write to it.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_status(path.lstat(), path)


def read_own_file(path: Path) -> bytes:
    """Return the content of a file that no other user can have written.

    Raises:
        PermissionError: the file belongs to another user, or others may write to it.
        OSError: the file cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_status(os.fstat(descriptor), path)
        return file.read()


def _check_status(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "other users can write to this file", str(path))
