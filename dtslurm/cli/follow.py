"""Follow a run on the screen: lines above, one line of progress below on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtslurm.cli.printing import output
from dtslurm.cli.printing.screen import PlainScreen, Screen, TerminalScreen, live
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.logs.logs import LogFilter, follow
from dtslurm.services.runs.runs import words_for_all
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context


def follow_to_end(
    context: Context,
    record: JobRecord,
    wanted: LogFilter,
    *,
    on_stderr: bool = False,
    fold: bool | None = None,
) -> RunView:
    """Show the run's output until it is over; return the last observation.

    Args:
        on_stderr: stdout is kept for data.
        fold: equal lines of many ranks as one; None for where people read along.
    """
    last: list[RunView] = []

    with parting_words(context, [record]), _screen(record, on_stderr=on_stderr, fold=fold) as screen:

        def watch(view: RunView) -> None:
            last[:] = [view]
            screen.state(view)

        for items in follow(context, record, wanted, watch=watch):
            screen.show(items)
        screen.end()
    return last[0]


@contextmanager
def parting_words(context: Context, records: Sequence[JobRecord]) -> Iterator[None]:
    """Tell who stops following jobs, or waiting for them, that they do not stop."""
    try:
        yield
    except KeyboardInterrupt:
        jobs = words_for_all(context, records)
        if len(records) == 1:
            output.note(f"the job goes on; dtslurm logs -f {jobs} follows it again")
        else:
            output.note(f"the jobs go on; dtslurm status {jobs} shows them")
        raise


@contextmanager
def _screen(record: JobRecord, *, on_stderr: bool, fold: bool | None) -> Iterator[Screen]:
    if not on_stderr and output.is_terminal():
        with live(record, fold=fold is not False) as screen:
            yield screen
    else:
        yield page(on_stderr=on_stderr, fold=bool(fold))


def page(*, on_stderr: bool = False, fold: bool | None = None) -> PlainScreen | TerminalScreen:
    """Return a screen without progress: for a terminal where stdout is one, else for a pipe."""
    stream = sys.stderr if on_stderr else sys.stdout
    terminal = not on_stderr and output.is_terminal()
    if not terminal and not fold:
        return PlainScreen(stream)
    return TerminalScreen(stream, fold=fold is not False, colours=terminal and output.has_colours())
