"""Launchers by name, from the entry-point group that third parties use too."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from dtslurm.errors import RequestInvalid
from dtslurm.launch.base import Launcher

GROUP = "dtslurm.launchers"


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Return the names of all launchers, without importing any."""
    return sorted(_entries())


def unknown(name: str) -> str:
    """Return what to say of a launcher that does not exist."""
    known = names()
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown launcher {name!r}{meant} (there are: {', '.join(known)})"


def load(name: str) -> Launcher:
    """Return the launcher of that name.

    Raises:
        RequestInvalid: there is none, or its package cannot be imported.
    """
    entry = _entries().get(name)
    if entry is None:
        raise RequestInvalid([unknown(name)])
    try:
        launcher: Launcher = entry.load()
    except Exception as error:  # a third party's import may fail in any way
        origin = entry.dist.name if entry.dist else "?"
        raise RequestInvalid([f"launcher {name!r} of package {origin} cannot be loaded: {error}"]) from error
    return launcher
