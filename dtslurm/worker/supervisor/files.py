"""Small files on a shared file system: whole or not at all, and never a crash for want of one."""

import contextlib
import errno
import json
import os
import time
from typing import Any, Callable, Dict, List, Optional, TypeVar

# Errors of a disk that is full and of a file server in trouble: both may pass.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT)

_Result = TypeVar("_Result")


def text_of(path: str) -> Optional[str]:
    """Return a file's text, None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def put(path: str, text: str) -> None:
    """Write a file whole: under another name, then renamed."""
    draft = "{}.{}".format(path, os.getpid())
    with open(draft, "w") as file:
        file.write(text)
    os.replace(draft, path)


def try_put(path: str, text: str) -> None:
    """Write a file whole, if that can be done now."""
    try:
        put(path, text)
    except OSError:
        return


def retry(act: Callable[[], _Result], patience_s: float) -> _Result:
    """Return what `act` returns, called again while a disk is full or a file server does not answer.

    Raises:
        OSError: it still fails after that time, or fails for good.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in PASSING or time.monotonic() > end:
                raise
            time.sleep(0.2)


def try_for(write: Callable[[], object], patience_s: float) -> None:
    """Write as `retry` does, and give up without a word."""
    with contextlib.suppress(OSError):
        retry(write, patience_s)


def is_there(path: str, patience_s: float = 0.0) -> bool:
    """Tell whether a path is there; False, too, if nothing tells that within this time."""

    def look() -> bool:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    try:
        return retry(look, patience_s)
    except OSError:
        return False


def json_of(path: str) -> Dict[str, Any]:
    """Return a JSON object, empty where there is none."""
    try:
        value = json.loads(text_of(path) or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def names_in(folder: str) -> List[str]:
    """Return what is in a folder, nothing where there is none."""
    try:
        return sorted(os.listdir(folder))  # of equal evidence the same node is named on every file system
    except OSError:
        return []
