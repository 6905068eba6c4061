"""Screens for log lines: plain for a pipe; for a terminal folded, colored, with a progress line below."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from dtslurm.cli.printing import output
from dtslurm.logs.clean import is_plain, safe
from dtslurm.logs.fold import Folded, LineFolder, rank_set
from dtslurm.logs.lines import LogBlock, LogFile
from dtslurm.model.jobs.job import JobRecord, LogLine
from dtslurm.services.logs.log_stream import Item, Mark, Notice, Record, Rewritten
from dtslurm.services.runs.status import RunView

# Colors that are distinguishable on dark and light backgrounds; a rank has the same color in every run.
_COLOURS = (32, 33, 36, 35, 34, 92, 93, 96, 95, 94)
_DIM_STYLE = 2
_BOLD_STYLE = 1
_MAX_LINES_WITH_BAR = (
    100  # lines at once for which the progress bar is hidden: it draws some thousand lines/s at most
)


class Screen(Protocol):
    """An output for log items and status changes."""

    def show(self, items: Sequence[Item]) -> None:
        """Show new items; called often, also without items."""

    def show_state(self, view: RunView) -> None:
        """Show the run's state as the scheduler reports it."""

    def end(self) -> None:
        """Show the items that are still buffered."""


def format_source(file: LogFile) -> str:
    """Return the prefix of a file's lines: the rank, with the array task if there is one."""
    return file.source if file.task is None else f"{file.task}/{file.source}"


class PlainScreen:
    """Prints every line with its prefix to a stream; notices and state changes go to stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_text = ""
        self.has_output = False
        self.folds = False

    def show(self, items: Sequence[Item]) -> None:
        """Print lines in one write."""
        texts = []
        for item in items:
            if isinstance(item, LogBlock):
                texts.append(prefix_lines(item))
            elif isinstance(item, Notice):
                output.note(item.text)
        if texts:
            self.has_output = True
            _write_to(self._stream, "".join(texts))

    def show_state(self, view: RunView) -> None:
        """Print the state if it changed."""
        text = summarize_state(view)
        if text != self._last_text:
            self._last_text = text
            output.note(text)

    def end(self) -> None:
        """Do nothing: no lines are buffered."""


class TerminalScreen:
    """Prints lines with a color for each rank, equal lines folded, and control characters removed."""

    def __init__(self, stream: TextIO, *, fold: bool, colours: bool) -> None:
        self._stream = stream
        self._colours = colours
        self.folds = fold
        self._folder = LineFolder()
        self._caught_up = False
        self.has_output = False

    def show(self, items: Sequence[Item]) -> None:
        """Buffer lines, and print those that waited long enough for equal lines."""
        now = time.monotonic()
        for item in items:
            if isinstance(item, LogBlock):
                self.has_output = True
                if self.folds:
                    self._folder.add(item.lines(), now)
                else:
                    self._print(
                        Folded(line, [] if line.rank is None else [line.rank]) for line in item.lines()
                    )
            elif item is Mark.CAUGHT_UP:
                self._caught_up = True
                self._print(self._folder.take(now, everything=True))
            elif isinstance(item, Notice):
                self._print(self._folder.take(now, everything=True))
                self._notice(item.text)
            else:
                self._handle_other(item)
        # The lines that exist at the start are folded as a whole.
        self._print(self._folder.take(now if self._caught_up else 0.0))

    def show_state(self, view: RunView) -> None:
        """Do nothing: the state is not shown."""

    def end(self) -> None:
        """Print the buffered lines."""
        self._print(self._folder.take(0.0, everything=True))

    def _print(self, folded_lines: Iterable[Folded]) -> None:
        text = "".join(self._format_line(folded) for folded in folded_lines)
        if text:
            self._write_text(text)

    def _write_text(self, text: str) -> None:
        _write_to(self._stream, text)

    def _notice(self, text: str) -> None:
        output.note(text)

    def _handle_other(self, item: Item) -> None:
        pass

    def _format_line(self, item: Folded) -> str:
        text = safe(item.line.text, colours=self._colours)
        return f"{self._format_prefix(item.line, item.ranks)} {text}\n"

    def _format_prefix(self, line: LogLine, ranks: list[int]) -> str:
        source = rank_set(ranks) if ranks else line.source
        head = f"[{source}]" if line.task is None else f"[{line.task}/{source}]"
        if not self._colours:
            return head
        colour = _DIM_STYLE
        if ranks:
            colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else _BOLD_STYLE
        return f"\x1b[{colour}m{head}\x1b[0m"


class LiveScreen(TerminalScreen):
    """A terminal screen above a progress line from the run's metrics."""

    def __init__(self, record: JobRecord, progress: Any, *, fold: bool, colours: bool) -> None:
        super().__init__(sys.stdout, fold=fold, colours=colours)
        self._progress = progress
        self._bar = progress.add_task(safe(record.name), total=None, values="")

    def show_state(self, view: RunView) -> None:
        """Show the state as the description of the progress line."""
        self._progress.update(self._bar, description=safe(summarize_state(view)))

    def _write_text(self, text: str) -> None:
        from rich.text import Text

        if text.count("\n") > _MAX_LINES_WITH_BAR:
            self._progress.stop()
            _write_to(self._stream, text)
            self._progress.start()
            return
        self._progress.console.print(Text.from_ansi(text[:-1]), soft_wrap=True)

    def _notice(self, text: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(safe(text), style="dim"), soft_wrap=True)

    def _handle_other(self, item: Item) -> None:
        if isinstance(item, Rewritten):
            self._progress.update(self._bar, values=f"[{format_source(item.file)}] {safe(item.text)}"[:60])
        elif isinstance(item, Record) and item.file.kind == "metrics":
            step, total, loss = (item.values.get(key) for key in ("step", "total_steps", "loss"))
            if isinstance(step, int) and isinstance(total, int):
                values = f"loss {loss:.4g}" if isinstance(loss, float) else ""
                self._progress.update(self._bar, completed=step, total=total, values=values)


@contextmanager
def open_live_screen(record: JobRecord, *, fold: bool) -> Iterator[Screen]:
    """Yield a terminal screen with a progress line below."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}", markup=False),
        TimeElapsedColumn(),
    )
    console = Console(highlight=False)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        screen = LiveScreen(record, progress, fold=fold, colours=output.has_colours())
        try:
            yield screen
        finally:
            screen.end()


def prefix_lines(block: LogBlock) -> str:
    """Return a block's lines, each with its prefix, without control characters."""
    prefix = f"[{format_source(block.file)}] "
    text = block.data.decode("utf-8", "replace")
    if not is_plain(block.data, text):
        return "".join(f"{prefix}{safe(line)}\n" for line in block.texts())
    return prefix + text[:-1].replace("\n", "\n" + prefix) + "\n"


def summarize_state(view: RunView) -> str:
    """Describe the state of a run in one line."""
    if view.trouble and any(status.word == "UNKNOWN" for status in view.statuses):
        return f"{view.record.name}: state unknown: {view.trouble}"
    counts: dict[str, int] = {}
    for status in view.statuses:
        counts[status.word] = counts.get(status.word, 0) + 1
    states = ", ".join(
        word if len(view.statuses) == 1 else f"{count} {word}" for word, count in counts.items()
    )
    reason = view.statuses[0].reason
    pending_reason = (
        f" ({reason})" if view.statuses[0].word == "PENDING" and reason not in ("", "None") else ""
    )
    stale_note = f", last known state ({view.trouble})" if view.trouble else ""
    return f"{view.record.name}: {states}{pending_reason}{stale_note}"


def _write_to(stream: TextIO, text: str) -> None:
    """Write text, with replacements for characters that the stream's encoding lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
