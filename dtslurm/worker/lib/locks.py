"""Locks between processes, which the kernel releases when their process ends."""

import errno
import fcntl
import time
from typing import IO, Any, Optional, Union

POLL_S = 0.01


def acquire_lock(file: Union[int, IO[Any]], patience_s: Optional[float] = None, shared: bool = False) -> bool:
    """Lock an open file; return False if another process still holds the lock after ``patience_s``.

    The lock is released when the file is closed.

    Args:
        patience_s: seconds to wait; None to wait without a limit.
        shared: other shared locks do not prevent this one.

    Raises:
        OSError: the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if patience_s is None:
        fcntl.flock(file, kind)
        return True
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        else:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
