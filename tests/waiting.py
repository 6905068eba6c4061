"""Waiting for events: the only way in which tests wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str = "it", *, limit: float = 120) -> None:
    """Return when `condition` holds; look again after a twentieth of the time that has passed.

    Raises:
        AssertionError: it did not hold within `limit` seconds, which are many: the machine may be busy.
    """
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        if waited > limit:
            raise AssertionError(f"{what} did not happen within {limit:g} s")
        time.sleep(min(1.0, max(0.02, waited / 20)))
