"""Starts the dashboard in the current terminal."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time

from textual.theme import BUILTIN_THEMES

from dtslurm.dashboard import ascii_fallback
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import Feed
from dtslurm.dashboard.theme import COLOUR_BLIND
from dtslurm.errors import RequestInvalid
from dtslurm.store.index import state_folder
from dtslurm.suggestions import list_nearest, suggest_name

_GC_THRESHOLD_0, _GC_THRESHOLD_1, _GC_THRESHOLD_2 = 20_000, 20, 10_000
_END_S = 5.0  # in which it ends without the terminal of a page
_SWITCH_INTERVAL_S = 0.0005  # reading threads yield to the drawing thread ten times sooner than by default


def run(
    feed: Feed,
    *,
    key: str | None,
    read_only: bool,
    ascii_only: bool,
    theme: str | None,
    in_browser: bool = False,
) -> None:
    """Run the dashboard until the user quits.

    Args:
        key: key of the job whose page opens at the start.
        in_browser: whether textual-serve shows it as a page, instead of a terminal.

    Raises:
        RequestInvalid: there is no theme of this name.
    """
    check_theme(theme)
    app = TopApp(
        feed,
        time.time,
        read_only=read_only,
        ascii_only=ascii_only or ascii_fallback.ascii_only(),
        job=None if key is None else lambda row: row.key == key,
        clipboard=state_folder() / "copied.txt",
    )
    app.requested_theme = theme
    if in_browser:
        threading.Thread(target=_end_with_server, daemon=True, name="dtslurm-server").start()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _tune_garbage_collector()
    app.run()


def _end_with_server() -> None:
    """Wait for the end of the server of this page, which Textual does not notice, and end then."""
    poll = select.poll()
    poll.register(sys.__stdin__, 0)  # type: ignore[arg-type]  # for nothing but the end of the other side
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    os._exit(1)


def check_theme(theme: str | None) -> None:
    """Raise `RequestInvalid` if there is no theme of this name; None means the default theme."""
    names = {*BUILTIN_THEMES, COLOUR_BLIND.name}
    if theme is not None and theme not in names:
        raise RequestInvalid(
            [f"no theme {theme!r}{suggest_name(theme, names)} (available: {list_nearest(theme, names)})"]
        )


def _tune_garbage_collector() -> None:
    """Configure Python's cyclic garbage collector so that its pauses do not delay key presses.

    Imported objects are never garbage and are excluded. Old objects, such as the cells of ten thousand ranks,
    are only scanned after a page was closed (`TopApp.leave_job`) and every few minutes.
    """
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD_0, _GC_THRESHOLD_1, _GC_THRESHOLD_2)
