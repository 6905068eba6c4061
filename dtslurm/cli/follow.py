"""Follow a run on the screen: lines above, one line of progress below on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from dtslurm.cli import output
from dtslurm.model.job import JobRecord, LogLine
from dtslurm.services.context import Context
from dtslurm.services.logs import LogReader, follow
from dtslurm.services.status import RunView
from dtslurm.store.rundir import RunDir


class Screen(Protocol):
    """Where lines and observations go."""

    def line(self, line: LogLine) -> None:
        """Show a line of output."""

    def state(self, view: RunView) -> None:
        """Show what the scheduler says."""


def follow_to_end(context: Context, reader: LogReader, *, on_stderr: bool = False) -> RunView:
    """Show the run's output until it is over; return the last observation.

    Args:
        on_stderr: stdout is kept for data.
    """
    last: list[RunView] = []

    with _screen(reader.record, on_stderr=on_stderr) as screen, _parting_words(reader.record):

        def watch(view: RunView) -> None:
            last[:] = [view]
            screen.state(view)

        for line in follow(context, reader, watch=watch):
            screen.line(line)
    return last[0]


def prefix(line: LogLine) -> str:
    """Return what stands before a line: the rank, and the array task where there are some."""
    place = line.source if line.task is None else f"{line.task}/{line.source}"
    return f"[{place}] "


@contextmanager
def _parting_words(record: JobRecord) -> Iterator[None]:
    """Tell who stops following that the job does not stop."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(f"the job goes on; dtslurm logs -f {record.job_id} follows it again")
        raise


@contextmanager
def _screen(record: JobRecord, *, on_stderr: bool) -> Iterator[Screen]:
    if on_stderr or not output.is_terminal():
        yield _PlainScreen(sys.stderr if on_stderr else sys.stdout)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(highlight=False), transient=True) as progress:
        yield _LiveScreen(record, progress)


class _PlainScreen:
    """Lines to a stream, changes of state to stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = ""

    def line(self, line: LogLine) -> None:
        """Print the line with its prefix."""
        self._stream.write(f"{prefix(line)}{output.safe(line.text)}\n")
        self._stream.flush()

    def state(self, view: RunView) -> None:
        """Print the state when it changes."""
        text = _state_words(view)
        if text != self._told:
            self._told = text
            output.note(text)


class _LiveScreen:
    """Lines scroll above a progress line made of the run's metrics."""

    def __init__(self, record: JobRecord, progress: Any) -> None:
        self._run = RunDir(Path(record.folder))
        self._progress = progress
        self._bar = progress.add_task(record.name, total=None, values="")

    def line(self, line: LogLine) -> None:
        """Print the line above the progress."""
        from rich.text import Text

        shown = Text(prefix(line), style="cyan")
        shown.append_text(Text.from_ansi(output.safe(line.text, colours=True)))
        self._progress.console.print(shown, soft_wrap=True)
        self._refresh()

    def state(self, view: RunView) -> None:
        """Show the state as the progress line's name."""
        self._progress.update(self._bar, description=_state_words(view))
        self._refresh()

    def _refresh(self) -> None:
        attempts = self._run.attempts()
        metrics = self._run.metrics(attempts[-1]) if attempts else []
        if not metrics:
            return
        step, total = metrics[-1].get("step"), metrics[-1].get("total_steps")
        loss = metrics[-1].get("loss")
        if isinstance(step, int) and isinstance(total, int):
            values = f"loss {loss:.4g}" if isinstance(loss, float) else ""
            self._progress.update(self._bar, completed=step, total=total, values=values)


def _state_words(view: RunView) -> str:
    if view.trouble:
        return f"{view.record.name}: state unknown: {view.trouble}"
    counts: dict[str, int] = {}
    for status in view.statuses:
        counts[status.word] = counts.get(status.word, 0) + 1
    words = ", ".join(
        word if len(view.statuses) == 1 else f"{count} {word}" for word, count in counts.items()
    )
    reason = view.statuses[0].reason
    waiting = f" ({reason})" if view.statuses[0].word == "PENDING" and reason not in ("", "None") else ""
    return f"{view.record.name}: {words}{waiting}"
