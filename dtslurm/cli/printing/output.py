"""stdout for results, stderr for people; nothing from outside reaches the terminal as control characters."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dtslurm.errors import DtslurmError
from dtslurm.logs.clean import safe
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.units import duration

__all__ = [
    "SCHEMA",
    "StyledLine",
    "comma_separated",
    "document",
    "duration",
    "is_terminal",
    "note",
    "say",
    "show_error",
    "size",
    "table",
]

SCHEMA = 1
_WIDEST_NAME = 24
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
_WHOLE = {"JOB", "STATE", "RANKS", "TIME"}


class StyledLine(str):
    """A line of text that knows the styles of its parts; where no colours are shown it is the text alone.

    Attributes:
        parts: each a text and its style, empty for none; together they are the line.
    """

    __slots__ = ("parts",)
    parts: tuple[tuple[str, str], ...]


def styled(*parts: tuple[str, str]) -> StyledLine:
    """Return a line of parts, each a text and its style; an empty style is none."""
    line = StyledLine("".join(text for text, _ in parts))
    line.parts = parts
    return line


def show_error(error: DtslurmError) -> None:
    """Print an error to stderr: what failed, the evidence, what to do."""
    for line in error.lines():
        click.echo(safe(line), err=True)


def note(text: str) -> None:
    """Print a line for people to stderr."""
    click.echo(safe(text), err=True)


def say(text: str = "") -> None:
    """Print a line of the result to stdout, with its styles where it has some and colours are shown."""
    if isinstance(text, StyledLine) and has_colours():
        from rich.console import Console
        from rich.text import Text

        parts = ((safe(part), style) for part, style in text.parts)
        Console(highlight=False).print(Text.assemble(*parts), soft_wrap=True)
    else:
        click.echo(safe(text))


def comma_separated(rows: Sequence[Sequence[object]]) -> None:
    """Print rows as CSV. Text that a spreadsheet would take for a formula gets an apostrophe before it."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows(
        [[_harmless(value) if isinstance(value, str) else value for value in row] for row in rows]
    )


def _harmless(text: str) -> str:
    clean = safe(text)
    if not clean.startswith(("=", "+", "-", "@", "\t")) or _NUMBER.fullmatch(clean):
        return clean
    return f"'{clean}"


def document(**values: Any) -> None:
    """Print one JSON document to stdout."""
    from dtslurm.store.codec import plain

    click.echo(json.dumps({"schema": SCHEMA, **plain(values)}, indent=2))


def queue_of(record: JobRecord) -> str:
    """Return in words where a run was queued: a login node of one cluster may send to another."""
    if record.mirror:
        return f"{record.cluster}, over SSH"
    return f"{record.cluster}, the Slurm on this machine" if record.transport == "local" else record.cluster


def work_dir_of(record: JobRecord) -> str:
    """Return in words where the files are that a run writes to relative paths; empty if that is not known."""
    if not record.work_dir:
        return ""
    if record.array:
        own = "$DTSLURM_CHECKPOINT_DIR and $SLURM_ARRAY_TASK_ID are each task's own"
        return f"{record.work_dir}, where relative paths of all its tasks begin; {own}"
    return f"{record.work_dir}, where relative paths of the job begin"


def size(amount: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Return whether stdout shows colours and its user wants them."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return the terminal's width, None where stdout is not one."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def fold(text: str, indent: int = 0) -> str:
    """Return a text in lines as wide as the terminal, broken behind spaces and commas.

    Args:
        indent: of all lines but the first. Where stdout is no terminal the text stays as it is.
    """
    limit = width()
    if limit is None:
        return text
    lines = [""]
    for piece in re.split(r"(?<=[ ,])", text):
        if len(lines[-1]) + len(piece.rstrip()) > limit and lines[-1].strip():
            lines.append(" " * indent)
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Mapping[str, str] | None = None,
    *,
    row_styles: Mapping[int, str] | None = None,
    lines: bool = False,
) -> None:
    """Print rows below bold column names; cells are shown as they are, never as markup.

    What is not a terminal gets plain lines, one for each row however long.

    Args:
        styles: of cells, by their text.
        row_styles: of rows, by their index.
        lines: whether a line end in a cell is one on the screen; not for texts from outside, which could pass
            for a row of the table.
    """
    if not is_terminal():
        _plain_table([columns, *rows])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        if column == "NAME":
            grid.add_column(column, overflow="ellipsis", no_wrap=True, max_width=_WIDEST_NAME)
        else:
            grid.add_column(column, overflow="fold", no_wrap=column in _WHOLE)
    for number, row in enumerate(rows):
        cells = [
            Text(_safe_lines(cell) if lines else safe(cell), style=(styles or {}).get(cell, ""))
            for cell in row
        ]
        grid.add_row(*cells, style=(row_styles or {}).get(number))
    Console(highlight=False).print(grid)


def _safe_lines(cell: str) -> str:
    return "\n".join(map(safe, cell.split("\n")))


def _plain_table(rows: Sequence[Sequence[str]]) -> None:
    clean = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    for row in clean:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
