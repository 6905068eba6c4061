"""Tells job files from other files: every submission asks, few are one."""

from __future__ import annotations

import re
from pathlib import Path

_SUFFIXES = (".yaml", ".yml")
_MARK = re.compile(rb"^(?:script|extends|variables|stages)[ \t]*:", re.MULTILINE)


def is_job_file(path: Path) -> bool:
    """Tell a job file from what else ends in ``.yaml``, such as a framework's configuration."""
    if path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return _MARK.search(file.read(65536)) is not None
    except OSError:
        return False
