"""Results of long runs (nemesis, soak, fuzz), kept in ``docs/robustness.json`` for the site."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "robustness.json"


def read() -> dict[str, dict[str, Any]]:
    """Return the last result of each kind of run."""
    result: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return result


def write(kind: str, values: Mapping[str, Any], seconds: float) -> None:
    """Put a result in the place of the last one of its kind."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    head = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{os.cpu_count()} CPUs, {platform.system()}, Python {platform.python_version()}",
        "seconds": round(seconds),
    }
    RESULTS.write_text(json.dumps({**read(), kind: {**head, **values}}, indent=1) + "\n")
