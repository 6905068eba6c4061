"""Constraints of several who ask, as one that asks for all. Pure.

Slurm (sbatch(1), --constraint) takes ``&`` and ``|`` from left to right and lets parentheses group them, but
not parentheses inside others. Brackets, counts and commas choose among sets of nodes: what stands beside
them does not hold for each node, so such a constraint is joined with no other.
"""

from __future__ import annotations

import re

_OF_SETS = re.compile(r"[][*,]")
_OUTSIDE = r"(?![^()]*\))"  # not between parentheses


def joined(*given: str | None) -> tuple[str | None, list[str]]:
    """Return what asks for all that is given, and what it leaves out where that cannot be said.

    The last one given goes before the others then.
    """
    texts = list(dict.fromkeys(text for text in given if text))
    if len(texts) < 2:
        return (texts[0] if texts else None), []
    parts = [_parts(text) for text in texts]
    if any(not part for part in parts):
        kept = _split(texts[-1])
        return texts[-1], [text for text in texts[:-1] if not set(_split(text)) <= set(kept)]
    return "&".join(dict.fromkeys(part for one in parts for part in one)), []


def _parts(text: str) -> list[str]:
    """Return what ``&`` can join of a constraint; nothing where it cannot."""
    if _OF_SETS.search(text) or not re.fullmatch(r"(?:[^()]|\([^()]*\))*", text):
        return []
    if not re.search(r"\|" + _OUTSIDE, text):
        return _split(text)
    return [] if "&" in text or "(" in text else [f"({text})"]


def _split(text: str) -> list[str]:
    return re.split("&" + _OUTSIDE, text)
