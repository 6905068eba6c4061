"""Words of shell commands: plain strings are quoted when printed, ``RawShell`` words are not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable

_VARIABLE_REFERENCE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"


class RawShell(str):
    """Shell text that is printed unquoted, for example ``RawShell('"$SLURM_NODEID"')``."""

    __slots__ = ()


def quote(word: object) -> str:
    """Return ``word`` as one shell word; ``RawShell`` words and integers are unchanged."""
    if isinstance(word, RawShell):
        return str(word)
    text = str(word)
    if text.startswith("=") and shlex.quote(text) == text:
        return f"'{text}'"  # A==mlx5_0 is valid, but looks wrong to readers and to shellcheck
    return shlex.quote(text)


def join(words: Iterable[object]) -> str:
    """Return the words as one command line, each quoted unless it is ``RawShell``."""
    return " ".join(quote(word) for word in words)


def in_double_quotes(text: str) -> str:
    """Escape text for double quotes, except plain ``$NAME`` and ``${NAME}``, which the shell expands."""
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return re.sub(rf"(?!{_VARIABLE_REFERENCE})\$", r"\\$", text)


JOB_VALUES = (
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    *("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP", "DTSLURM_RUN_DIR"),
)
JOB_VALUE = rf"\{{({'|'.join(JOB_VALUES)})\}}|({'|'.join(JOB_VALUES)})\b"
_JOB_VALUE_REFERENCE = re.compile(rf"(\$?)\$(?:{JOB_VALUE})")


def quote_with_job_values(text: str) -> str:
    """Return an argument as one word in which the shell expands variables such as ``$SLURM_ARRAY_TASK_ID``.

    Only the names in `JOB_VALUES` are expanded; ``$$NAME`` stands for a literal ``$NAME``.
    """
    return quote_with_expansions(text, _JOB_VALUE_REFERENCE, lambda match: match[2] or match[3])


def quote_with_expansions(
    text: str, references: re.Pattern[str], find_name: Callable[[re.Match[str]], str | None]
) -> str:
    """Return an argument as one word in which the shell expands references to variables.

    Args:
        references: matches a reference; its first group is ``$`` if the reference is escaped.
        find_name: returns the variable of a reference, None for text that is no reference.
    """
    words, end = [], 0
    for match in references.finditer(text):
        name = find_name(match)
        if name is None:
            continue
        words.append(text[end : match.start()])
        words.append(match[0][1:] if match[1] else RawShell(f'"${name}"'))
        end = match.end()
    if not words:
        return text
    words.append(text[end:])
    if not any(isinstance(word, RawShell) for word in words):
        return "".join(words)
    return RawShell("".join(quote(word) for word in words if word))


def find_job_values(text: str) -> list[str]:
    """Return the job values that `with_job_values` expands in a text."""
    return [match[2] or match[3] for match in _JOB_VALUE_REFERENCE.finditer(text) if not match[1]]


def quote_with_variables(text: str) -> str:
    """Return a value as one word in which the shell expands ``$NAME`` and ``${NAME}``."""
    return RawShell(f'"{in_double_quotes(text)}"') if re.search(_VARIABLE_REFERENCE, text) else text
