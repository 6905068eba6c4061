"""Suggest known names for one that is unknown."""

from __future__ import annotations

from collections.abc import Iterable

_CLOSE = 0.6
_LISTED = 5


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a known name is close to ``name``, else an empty text."""
    close = _find_nearest(name, known, most=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]!r}?" if close else ""


def list_nearest(name: str, known: Iterable[str]) -> str:
    """Return all of a few known names, and the five nearest ones of many: ``a, b, c, d, e, and 78 more``."""
    names = sorted(set(known))
    if len(names) <= _LISTED:
        return ", ".join(names) or "none"
    nearest = _find_nearest(name, names, most=_LISTED, cutoff=0.0)
    return f"{', '.join(nearest)}, and {len(names) - len(nearest)} more"


def _find_nearest(name: str, known: Iterable[str], *, most: int, cutoff: float) -> list[str]:
    """Return the nearest known names, nearest first; case and ``-`` or ``_`` make no difference."""
    import difflib  # slow to import, and needed for messages only

    by_folded_name = {_fold(one): one for one in known}
    close = difflib.get_close_matches(_fold(name), by_folded_name, n=most, cutoff=cutoff)
    return [by_folded_name[one] for one in close]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
