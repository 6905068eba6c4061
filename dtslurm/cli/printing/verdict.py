"""Lines of a verdict: a label beside a text."""

from __future__ import annotations

import sys
import textwrap

from dtslurm.cli.printing import output
from dtslurm.cli.printing.styles import SECONDARY
from dtslurm.logs.clean import safe


def width() -> int:
    """Return the maximum width of lines: the terminal's, from 40 to 100 columns; unlimited for a pipe."""
    columns = output.width()
    return sys.maxsize if columns is None else max(40, min(100, columns))


def wrap_words(text: str, width: int) -> list[str]:
    """Wrap a text between words."""
    return textwrap.wrap(safe(text), width, break_long_words=False, break_on_hyphens=False)


def format_field(label: str, text: str, width: int, style: str = "") -> list[str]:
    """Return the lines of a text in its style beside its label; words, which may be paths, are not broken."""
    wrapped_lines = wrap_words(text, width - 14) or [""]
    return [
        output.styled((f"{label if number == 0 else '':<14}", SECONDARY), (wrapped_line, style))
        for number, wrapped_line in enumerate(wrapped_lines)
    ]
