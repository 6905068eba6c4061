"""Progress bars of transfers on a terminal; none for a transfer that ends within half a second."""

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
    """Yield a callback for (name, bytes so far, total bytes)."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    bar = _ProgressBar()
    try:
        yield bar
    finally:
        bar.close()


class _ProgressBar:
    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._close: Callable[[], None] | None = None
        self._update: Callable[..., None] = lambda **_: None

    def __call__(self, name: str, copied_bytes: int, total_bytes: int) -> None:
        if self._close is None:
            if time.monotonic() - self._started_s < _QUICK_S:
                return
            self._open()
        self._update(description=safe(name), completed=copied_bytes, total=total_bytes)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        progress = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        task_id = progress.add_task("", total=None)
        progress.start()
        self._close = progress.stop
        self._update = partial(progress.update, task_id)

    def close(self) -> None:
        """Remove the bar."""
        if self._close is not None:
            self._close()
