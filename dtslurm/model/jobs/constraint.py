"""Combination of several Slurm constraints into one. No side effects.

Slurm (sbatch(1), --constraint) evaluates ``&`` and ``|`` from left to right. Parentheses group them but
cannot be nested. Brackets, counts and commas choose among sets of nodes, so that the rest of such a
constraint does not apply to every node. Such a constraint is therefore not combined with others.
"""

from __future__ import annotations

import re

_SET_SYNTAX = re.compile(r"[][*,]")
_OUTSIDE_PARENTHESES = r"(?![^()]*\))"  # a position outside parentheses


def join_constraints(*constraints: str | None) -> tuple[str | None, list[str]]:
    """Return one constraint that requires all given ones, and the constraints that it cannot include.

    If they cannot be combined, the last one takes precedence.
    """
    texts = list(dict.fromkeys(text for text in constraints if text))
    if len(texts) < 2:
        return (texts[0] if texts else None), []
    parts_by_text = [_split_for_joining(text) for text in texts]
    if any(not part for part in parts_by_text):
        last_parts = _split_at_and(texts[-1])
        return texts[-1], [text for text in texts[:-1] if not set(_split_at_and(text)) <= set(last_parts)]
    return "&".join(dict.fromkeys(part for parts in parts_by_text for part in parts)), []


def _split_for_joining(text: str) -> list[str]:
    """Return the parts of a constraint that ``&`` can join, an empty list if it cannot be joined."""
    if _SET_SYNTAX.search(text) or not re.fullmatch(r"(?:[^()]|\([^()]*\))*", text):
        return []
    if not re.search(r"\|" + _OUTSIDE_PARENTHESES, text):
        return _split_at_and(text)
    return [] if "&" in text or "(" in text else [f"({text})"]


def _split_at_and(text: str) -> list[str]:
    return re.split("&" + _OUTSIDE_PARENTHESES, text)
