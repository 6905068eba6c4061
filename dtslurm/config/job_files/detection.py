"""Fast detection of job files: every submission checks its script, and few scripts are job files."""

from __future__ import annotations

import re
from pathlib import Path

_SUFFIXES = (".yaml", ".yml")
_JOB_FILE_KEY = re.compile(rb"^(?:script|extends|variables|stages|roles)[ \t]*:", re.MULTILINE)


def is_job_file(path: Path) -> bool:
    """Return whether a file is a job file, and not another YAML file such as a framework's configuration."""
    if path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return _JOB_FILE_KEY.search(file.read(65536)) is not None
    except OSError:
        return False
