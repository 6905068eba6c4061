"""Files on a shared file system: read without errors if missing, and written again while the disk fails."""

import contextlib
import errno
import os
import time
from typing import Callable, List, Optional, TypeVar

from ..lib.json_records import write_atomically

# Errors of a full disk and of an unresponsive file server: both may be temporary.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT)

_Result = TypeVar("_Result")


def text_of(path: str) -> Optional[str]:
    """Return a file's text, None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def try_put(path: str, text: str) -> None:
    """Write a file atomically, without a flush to the disk; ignore errors."""
    with contextlib.suppress(OSError):
        write_atomically(path, text, sync=False)


def retry(function: Callable[[], _Result], patience_s: float) -> _Result:
    """Return what `function` returns, called again while a disk is full or a file server does not answer.

    Raises:
        OSError: `function` still fails after that time, or the error is permanent.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return function()
        except OSError as error:
            if error.errno not in PASSING or time.monotonic() > end:
                raise
            time.sleep(0.2)


def try_for(write: Callable[[], object], patience_s: float) -> None:
    """Call `write` as `retry` does; ignore its last error."""
    with contextlib.suppress(OSError):
        retry(write, patience_s)


def is_there(path: str, patience_s: float = 0.0) -> bool:
    """Return whether a path exists; False also if that cannot be determined within this time."""

    def check_path() -> bool:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    try:
        return retry(check_path, patience_s)
    except OSError:
        return False


def names_in(folder: str) -> List[str]:
    """Return the sorted names in a folder, none if it cannot be read."""
    try:
        # Sorted, so that equal evidence blames the same node on every file system.
        return sorted(os.listdir(folder))
    except OSError:
        return []
