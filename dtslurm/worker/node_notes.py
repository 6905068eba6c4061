"""Reads and appends lines of a file that several people or processes write; nothing in it is trusted.

Used as it is here, and sent over stdin with a call of :func:`answer` behind it where the file is another
machine's. The request is ``{"path": …, "lines": […], "mode": 0o600}``.
"""

import errno
import fcntl
import os
import stat
import time
from typing import Any, Dict, List, Sequence

MOST = 1 << 20  # bytes that are read, from the end
PATIENCE_S = 5.0


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the file's lines, after some were appended; or why that could not be."""
    try:
        lines = exchange(request["path"], request["lines"], int(request.get("mode", 0o600)))
    except OSError as error:
        return {"schema": 1, "problem": error.strerror or str(error)}
    return {"schema": 1, "lines": lines}


def exchange(path: str, lines: Sequence[str], mode: int = 0o600) -> List[str]:
    """Append lines to a file, and return all in it; nothing where there is no file and nothing to append.

    Raises:
        OSError: it cannot be read or written, or is no plain file.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_RDWR | os.O_APPEND | os.O_CREAT if lines else os.O_RDONLY
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ENOENT and not lines:
            return []
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if lines:
            _append(descriptor, lines, mode)
        return _lines(descriptor)
    finally:
        os.close(descriptor)


def _append(descriptor: int, lines: Sequence[str], mode: int) -> None:
    """Write lines at the end in one go; one that a crash cut off stays alone on its line."""
    _lock(descriptor)
    size = os.fstat(descriptor).st_size
    if not size and os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, mode)  # whatever the umask: a team's file is for the team
    whole = not size or os.pread(descriptor, 1, size - 1) == b"\n"
    os.write(descriptor, (b"" if whole else b"\n") + "".join(one + "\n" for one in lines).encode())
    os.fsync(descriptor)


def _lock(descriptor: int) -> None:
    """Wait for the others a while; one append stays whole without the lock, too."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(0.05)
        except OSError:  # no locks on this file system
            return
        else:
            return


def _lines(descriptor: int) -> List[str]:
    size = os.fstat(descriptor).st_size
    start = max(0, size - MOST)
    data = os.pread(descriptor, MOST, start)
    if start:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace").splitlines()
