"""Words of a shell command: plain strings are quoted when printed, ``Sh`` is left to the shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


class Sh(str):
    """Shell text that must reach the script as it is, for example ``Sh('"$SLURM_NODEID"')``."""

    __slots__ = ()


def quote(word: object) -> str:
    """Return ``word`` as one shell word; ``Sh`` and integers pass unchanged."""
    if isinstance(word, Sh):
        return str(word)
    text = str(word)
    if text.startswith("=") and shlex.quote(text) == text:
        return f"'{text}'"  # A==mlx5_0 is right, and looks wrong to people and to shellcheck
    return shlex.quote(text)


def join(words: Iterable[object]) -> str:
    """Return the words as one command line, each quoted unless it is ``Sh``."""
    return " ".join(quote(word) for word in words)
