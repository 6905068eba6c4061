"""Lines of a verdict: a label and a text beside it."""

from __future__ import annotations

import sys
import textwrap

from dtslurm.cli.printing import output
from dtslurm.cli.printing.styles import SECONDARY
from dtslurm.logs.clean import safe


def width() -> int:
    """Return how wide lines may be: as a terminal is; for a pipe, where people search and copy, anyhow."""
    columns = output.width()
    return sys.maxsize if columns is None else max(40, min(100, columns))


def folded(text: str, width: int) -> list[str]:
    """Return a text as lines between words."""
    return textwrap.wrap(safe(text), width, break_long_words=False, break_on_hyphens=False)


def field(label: str, text: str, width: int, style: str = "") -> list[str]:
    """Return a text in its style beside its label; no word, which may be a path, is broken."""
    parts = folded(text, width - 14) or [""]
    return [
        output.styled((f"{label if number == 0 else '':<14}", SECONDARY), (part, style))
        for number, part in enumerate(parts)
    ]
