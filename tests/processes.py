"""Whether processes live, as tests ask."""

from __future__ import annotations

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Tell whether a process still runs; a zombie that waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends_in_time(pid: int, seconds: float = 60) -> bool:
    """Tell whether a process ends in that time."""
    end = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
