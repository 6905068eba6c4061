"""Progress of transfers, on a terminal; nothing elsewhere, and nothing for what is over at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from dtslurm.logs.clean import safe

Show = Callable[[str, int, int], None]
_QUICK_S = 0.5


@contextmanager
def transfer() -> Iterator[Show]:
    """Yield what to call with (name, bytes so far, bytes in all)."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    shown = _Bar()
    try:
        yield shown
    finally:
        shown.close()


class _Bar:
    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._close: Callable[[], None] | None = None
        self._update: Callable[..., None] = lambda **_: None

    def __call__(self, name: str, done: int, size: int) -> None:
        if self._close is None:
            if time.monotonic() - self._begun < _QUICK_S:
                return
            self._open()
        self._update(description=safe(name), completed=done, total=size)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bars = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        bar = bars.add_task("", total=None)
        bars.start()
        self._close = bars.stop
        self._update = partial(bars.update, bar)

    def close(self) -> None:
        """Take the bar away."""
        if self._close is not None:
            self._close()
