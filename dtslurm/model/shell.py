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


JOB_VALUES = (
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    *("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP", "DTSLURM_RUN_DIR"),
)
_JOB_VALUE = re.compile(rf"(\$?)\$(?:\{{({'|'.join(JOB_VALUES)})\}}|({'|'.join(JOB_VALUES)})\b)")


def with_job_values(text: str) -> str:
    """Return an argument as one word in which the job's shell fills in ``$SLURM_ARRAY_TASK_ID`` and its like.

    Only the names of `JOB_VALUES` are filled in; ``$$NAME`` stands for ``$NAME`` itself.
    """
    pieces, end = [], 0
    for found in _JOB_VALUE.finditer(text):
        escape, name = found[1], found[2] or found[3]
        pieces.append(text[end : found.start()])
        pieces.append(found[0][1:] if escape else Sh(f'"${name}"'))
        end = found.end()
    if not pieces:
        return text
    pieces.append(text[end:])
    if not any(isinstance(piece, Sh) for piece in pieces):
        return "".join(pieces)
    return Sh("".join(quote(piece) for piece in pieces if piece))


def job_values_in(text: str) -> list[str]:
    """Return the job values that `with_job_values` fills in."""
    return [found[2] or found[3] for found in _JOB_VALUE.finditer(text) if not found[1]]


def filled_in(text: str) -> str:
    """Return a value whose ``$NAME`` and ``${NAME}`` the shell fills in, as one word when it is printed."""
    return Sh(f'"{in_double_quotes(text)}"') if re.search(_VARIABLE, text) else text
