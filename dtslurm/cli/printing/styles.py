"""The styles of printed output for all commands.

Styles use the terminal's 16 colors, which are readable on its dark or light background. No meaning depends
on a color alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from dtslurm.logs.exceptions import EXCEPTION_NAME

EXCEPTION = "bold white on red"  # the most visible line of a screen
FAILED = "bold red"
MAIN = "bold"
SECONDARY = "dim"
STATES = {
    "RUNNING": "green",
    "STALLED": FAILED,
    "COMPLETED": SECONDARY,
    "FAILED": FAILED,
    "TIMEOUT": "red",
    "CANCELLED": "magenta",
}

_STATE = re.compile(r"\b[A-Z_]+\b")
_EXCEPTION = re.compile(rf"(?:^|(?<=[\s,;])){EXCEPTION_NAME}(?=:(?: |$)|$| \()")


def style_of_state(state_text: str) -> str:
    """Return the style of a displayed state (``STALLED 3m40s``), empty for none."""
    return STATES.get(state_text.partition(" ")[0], "")


def style_states(text: str) -> list[tuple[str, str]]:
    """Split a text at the names of states, and return its parts with their styles."""
    parts, end = [], 0
    for match in _STATE.finditer(text):
        if style := STATES.get(match[0]):
            parts += [(text[end : match.start()], ""), (match[0], style)]
            end = match.end()
    return [*parts, (text[end:], "")]


def find_exception(text: str) -> int | None:
    """Return the index of a Python exception's name in a text, None if there is none."""
    match = _EXCEPTION.search(text)
    return match.start() if match else None


def style_exception(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the parts of each line of a wrapped text, highlighted from the name of an exception on."""
    in_exception = False
    for line in lines:
        start = 0 if in_exception else find_exception(line)
        if start is None:
            yield ((line, ""),)
            continue
        in_exception = True
        yield (line[:start], ""), (line[start:], EXCEPTION)
