"""Waiting for events: the only way in which tests wait for what other processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_USUAL_LOAD = 3.0  # processes that want a CPU, for each CPU, while the suite runs alone


def wait_until(condition: Callable[[], object], what: str = "it", *, limit: float = 120) -> None:
    """Return when `condition` holds.

    It is evaluated again after a twentieth of the time that has passed, or four times the time that it takes,
    and after five seconds at most: a test that polls a command would otherwise keep a CPU busy.

    Raises:
        AssertionError: it did not hold within `limit` seconds, or more where the machine is busy.
    """
    begin = time.monotonic()
    while True:
        began = time.monotonic()
        if condition():
            return
        waited, cost = time.monotonic() - begin, time.monotonic() - began
        if waited > limit * busyness():
            raise AssertionError(f"{what} did not happen within {limit:g} s")
        time.sleep(min(5.0, max(0.02, waited / 20, 4 * cost)))


def busyness() -> float:
    """Return how many times longer than usual everything may take now: 1 or more, by the machine's load."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / _USUAL_LOAD)
