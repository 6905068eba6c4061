"""Small files on a shared file system: whole or not at all, and never a crash for want of one."""

import errno
import json
import os
import time
from typing import Any, Callable, Dict, List, Optional


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


def once_there_is_room(write: Callable[[], object], patience_s: float) -> bool:
    """Write, and again while the disk is full, but no longer than that; tell whether it could be done."""
    end = time.monotonic() + patience_s
    while True:
        try:
            write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > end:
                return False
            time.sleep(0.2)
        else:
            return True


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
