"""Output: results to stdout, messages to stderr. Control characters in external text are removed."""

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

__all__ = [
    "SCHEMA",
    "StyledLine",
    "comma_separated",
    "document",
    "is_terminal",
    "note",
    "say",
    "show_error",
    "table",
]

SCHEMA = 1
_MAX_NAME_WIDTH = 24
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
_UNBROKEN_COLUMNS = {"JOB", "STATE", "RANKS", "TIME"}


class StyledLine(str):
    """A line of text with the styles of its parts, which are ignored if colors are off.

    Attributes:
        parts: (text, style) pairs whose texts form the line; an empty style is none.
    """

    __slots__ = ("parts",)
    parts: tuple[tuple[str, str], ...]


def styled(*parts: tuple[str, str]) -> StyledLine:
    """Return a line from (text, style) pairs; an empty style is none."""
    line = StyledLine("".join(text for text, _ in parts))
    line.parts = parts
    return line


def show_error(error: DtslurmError) -> None:
    """Print an error to stderr: the message, the evidence, the hint."""
    for line in error.lines():
        click.echo(safe(line), err=True)


def note(text: str) -> None:
    """Print a message for the user to stderr."""
    click.echo(safe(text), err=True)


def say(text: str = "") -> None:
    """Print a line of the result to stdout, with its styles if colors are on."""
    if isinstance(text, StyledLine) and has_colours():
        from rich.console import Console
        from rich.text import Text

        parts = ((safe(part), style) for part, style in text.parts)
        Console(highlight=False).print(Text.assemble(*parts), soft_wrap=True)
    else:
        click.echo(safe(text))


def comma_separated(rows: Sequence[Sequence[object]]) -> None:
    """Print rows as CSV; text that a spreadsheet would parse as a formula gets a leading apostrophe."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows(
        [[_escape_formula(value) if isinstance(value, str) else value for value in row] for row in rows]
    )


def _escape_formula(text: str) -> str:
    clean = safe(text)
    if not clean.startswith(("=", "+", "-", "@", "\t")) or _NUMBER.fullmatch(clean):
        return clean
    return f"'{clean}"


def document(**values: Any) -> None:
    """Print one JSON document to stdout."""
    from dtslurm.store.codec import plain

    click.echo(json.dumps({"schema": SCHEMA, **plain(values)}, indent=2))


def queue_of(record: JobRecord) -> str:
    """Describe where a run was queued, because one cluster's login node may submit to another cluster."""
    if record.mirror:
        return f"{record.cluster}, over SSH"
    return f"{record.cluster}, the Slurm on this machine" if record.transport == "local" else record.cluster


def work_dir_of(record: JobRecord) -> str:
    """Describe the folder of the relative paths that a run writes to; empty if it is unknown."""
    if not record.work_dir:
        return ""
    if record.array:
        per_task = "$DTSLURM_CHECKPOINT_DIR and $SLURM_ARRAY_TASK_ID differ for each task"
        return f"{record.work_dir}, the base of relative paths of all tasks; {per_task}"
    return f"{record.work_dir}, the base of relative paths"


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Return whether stdout is a terminal with colors, and NO_COLOR is not set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return the terminal's width in columns, None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def fold(text: str, indent: int = 0) -> str:
    """Wrap a text to the terminal's width, after spaces and commas; unchanged if stdout is not a terminal.

    Args:
        indent: the indent of all lines but the first, in columns.
    """
    limit = width()
    if limit is None:
        return text
    lines = [""]
    for word in re.split(r"(?<=[ ,])", text):
        if len(lines[-1]) + len(word.rstrip()) > limit and lines[-1].strip():
            lines.append(" " * indent)
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Mapping[str, str] | None = None,
    *,
    row_styles: Mapping[int, str] | None = None,
    lines: bool = False,
) -> None:
    """Print rows below bold column names; cells are printed literally, not as markup.

    If stdout is not a terminal, each row is one plain line of any length.

    Args:
        styles: styles of cells, by their text.
        row_styles: styles of rows, by index.
        lines: whether line ends in cells are kept; not for external text, which could imitate a row.
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
            grid.add_column(column, overflow="ellipsis", no_wrap=True, max_width=_MAX_NAME_WIDTH)
        else:
            grid.add_column(column, overflow="fold", no_wrap=column in _UNBROKEN_COLUMNS)
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
