"""Parts found by entry point: the built-in ones come through the same door as third parties'."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from dtslurm.errors import RequestInvalid


@cache  # reading every package's metadata takes 10 ms
def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


@cache
def _own(group: str) -> dict[str, EntryPoint]:
    """Return those of our own package, which is quicker to read than all that are installed."""
    try:
        return {entry.name: entry for entry in distribution("dtslurm").entry_points if entry.group == group}
    except PackageNotFoundError:
        return {}


def names(group: str) -> list[str]:
    """Return the names in an entry-point group, without importing anything."""
    return sorted(_entries(group))


def load(group: str, kind: str, name: str) -> Any:
    """Return the object of that name; ``kind`` is what people call it.

    Raises:
        RequestInvalid: there is none, or its package cannot be imported.
    """
    entry = _own(group).get(name) or _entries(group).get(name)
    if entry is None:
        known = names(group)
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise RequestInvalid([f"unknown {kind} {name!r}{meant} (there are: {', '.join(known)})"])
    try:
        return entry.load()
    except Exception as error:  # a third party's import may fail in any way
        origin = entry.dist.name if entry.dist else "?"
        raise RequestInvalid([f"{kind} {name!r} of package {origin} cannot be loaded: {error}"]) from error
