"""A lock between processes that want to do the same thing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try once to be the only one who holds the file ``path``, made if missing; give whether we are.

    The kernel frees the lock of a process that ends. Where there are no locks, everybody is alone.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:
            free = True
        yield free
    finally:
        os.close(descriptor)
