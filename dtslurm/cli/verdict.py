"""Lines of a verdict: a label and a text beside it."""

from __future__ import annotations

import shutil
import textwrap

from dtslurm.logs.clean import safe


def width() -> int:
    """Return how wide lines may be."""
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def field(label: str, text: str, width: int) -> list[str]:
    """Return a text beside its label."""
    parts = textwrap.wrap(safe(text), width - 14, break_on_hyphens=False) or [""]
    return [f"{label if number == 0 else '':<14}{part}" for number, part in enumerate(parts)]
