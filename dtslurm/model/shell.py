"""Words of a shell command: plain strings are quoted when printed, ``Sh`` is left to the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_VARIABLE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"


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


def in_double_quotes(text: str) -> str:
    """Escape for double quotes, leaving plain ``$NAME`` and ``${NAME}`` to the shell."""
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return re.sub(rf"(?!{_VARIABLE})\$", r"\\$", text)


def filled_in(text: str) -> str:
    """Return a value whose ``$NAME`` and ``${NAME}`` the shell fills in, as one word when it is printed."""
    return Sh(f'"{in_double_quotes(text)}"') if re.search(_VARIABLE, text) else text
