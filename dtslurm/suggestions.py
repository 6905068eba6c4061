"""Suggestions of known names in place of an unknown one."""

from __future__ import annotations

from collections.abc import Iterable

_MIN_SIMILARITY = 0.6
_MAX_LISTED = 5


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` if a known name is similar to ``name``, else an empty text."""
    matches = _find_nearest(name, known_names, limit=1, cutoff=_MIN_SIMILARITY)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def list_nearest(name: str, known_names: Iterable[str]) -> str:
    """Return all known names if they are few, else the five nearest ones: ``a, b, c, d, e, and 78 more``."""
    names = sorted(set(known_names))
    if len(names) <= _MAX_LISTED:
        return ", ".join(names) or "none"
    nearest = _find_nearest(name, names, limit=_MAX_LISTED, cutoff=0.0)
    return f"{', '.join(nearest)}, and {len(names) - len(nearest)} more"


def _find_nearest(name: str, known_names: Iterable[str], *, limit: int, cutoff: float) -> list[str]:
    """Return the nearest known names, nearest first. Case and ``-`` or ``_`` make no difference."""
    import difflib  # slow to import, and needed for messages only

    by_folded_name = {_fold(candidate): candidate for candidate in known_names}
    matches = difflib.get_close_matches(_fold(name), by_folded_name, n=limit, cutoff=cutoff)
    return [by_folded_name[candidate] for candidate in matches]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
