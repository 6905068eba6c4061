"""A lock that lets one of several processes do a task."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try once, without waiting, to lock the file ``path``; yield whether the lock was acquired.

    The file is created if it is missing. The kernel releases the lock of a process that ends. On a file
    system without locks, every caller acquires it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired = True
        except BlockingIOError:
            acquired = False
        except OSError:
            acquired = True
        yield acquired
    finally:
        os.close(descriptor)
