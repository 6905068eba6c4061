"""Starts the application at this terminal."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual.theme import BUILTIN_THEMES

from dtslurm.dashboard import ascii_fallback
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import Feed
from dtslurm.dashboard.theme import COLOUR_BLIND
from dtslurm.errors import RequestInvalid
from dtslurm.services.observe.diagnose import Diagnosis
from dtslurm.services.observe.live import Live
from dtslurm.services.wiring.context import Context
from dtslurm.store.index import state_folder
from dtslurm.suggestions import list_nearest, suggest_name

if TYPE_CHECKING:
    from dtslurm.services.observe.compare import Comparison

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 10_000
_TURN_S = 0.0005  # a thread that reads gives way to the one that draws ten times sooner than by default


def run(
    *,
    cluster: str | None,
    key: str | None,
    read_only: bool,
    ascii_only: bool,
    theme: str | None,
    say: Callable[[Diagnosis | Live], Sequence[str]],
    say_comparison: Callable[[Comparison], Sequence[str]] = lambda _: (),
) -> None:
    """Show the dashboard until it is left.

    Args:
        key: of the job whose page opens at once.
        say: makes lines of a verdict.
        say_comparison: makes lines of a comparison of runs.

    Raises:
        RequestInvalid: there is no such theme.
    """
    check_theme(theme)
    app = TopApp(
        Feed(Context, say, cluster=cluster, say_comparison=say_comparison),
        time.time,
        read_only=read_only,
        ascii_only=ascii_only or ascii_fallback.ascii_only(),
        job=None if key is None else lambda row: row.key == key,
        clipboard=state_folder() / "copied.txt",
    )
    app.wanted_theme = theme
    sys.setswitchinterval(_TURN_S)
    _calm_collector()
    app.run()


def check_theme(theme: str | None) -> None:
    """Raise `RequestInvalid` if there is no such theme; None is the default one."""
    known = {*BUILTIN_THEMES, COLOUR_BLIND.name}
    if theme is not None and theme not in known:
        raise RequestInvalid(
            [f"no theme {theme!r}{suggest_name(theme, known)} (there are: {list_nearest(theme, known)})"]
        )


def _calm_collector() -> None:
    """Keep Python's collector of cycles from stopping everything for as long as keys take notice.

    What was imported is never garbage and need not be walked. Old objects, the cells of ten thousand ranks
    among them, are only walked when a page was left (`TopApp.leave_job`) and every few minutes.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
