"""Small files on a shared file system: whole or not at all, and never a crash for want of one."""

import json
import os
from typing import Any, Dict, List, Optional


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
        return os.listdir(folder)
    except OSError:
        return []
