"""What ``make test-gpu`` measured when it last ran: ``docs/gpu.json``."""

from __future__ import annotations

import fcntl
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "gpu.json"
Results = dict[str, Any]


def read(path: Path = RESULTS) -> Results:
    """Return what was measured; nothing if it never ran."""
    result: Results = json.loads(path.read_text()) if path.exists() else {}
    return result


def record(part: str, name: str, value: Any, path: Path = RESULTS) -> None:
    """Write a value into a part of the results, and today's date; other values of the part stay.

    Tests in several processes may call this at the same time.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        result = read(path)
        values = result.setdefault(part, {})
        values |= {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), name: value}
        path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    finally:
        os.close(folder)
