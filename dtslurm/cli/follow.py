"""Follow a run on the screen: log lines, and on a terminal a progress line below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtslurm.cli.printing import output
from dtslurm.cli.printing.screen import PlainScreen, Screen, TerminalScreen, open_live_screen
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.logs.logs import LogFilter, follow
from dtslurm.services.runs.control import cancel_in_allocation
from dtslurm.services.runs.runs import words_for_all
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import is_step_id


def follow_to_end(
    context: Context,
    record: JobRecord,
    log_filter: LogFilter,
    *,
    on_stderr: bool = False,
    fold: bool | None = None,
    cancels_in_allocation: bool = False,
) -> RunView:
    """Show the run's output until the run ends; return its last view.

    Args:
        cancels_in_allocation: as in `report_continuing_jobs`.
        on_stderr: print to stderr, because stdout is for data.
        fold: merge equal lines of several ranks; None: only on a terminal.
    """
    last_view: list[RunView] = []

    with (
        report_continuing_jobs(context, [record], cancels_in_allocation=cancels_in_allocation),
        _open_screen(record, on_stderr=on_stderr, fold=fold) as screen,
    ):

        def watch(view: RunView) -> None:
            last_view[:] = [view]
            screen.show_state(view)

        for items in follow(context, record, log_filter, watch=watch):
            screen.show(items)
        screen.end()
    return last_view[0]


@contextmanager
def report_continuing_jobs(
    context: Context, records: Sequence[JobRecord], *, cancels_in_allocation: bool = False
) -> Iterator[None]:
    """Print on Ctrl-C that the jobs continue.

    Args:
        cancels_in_allocation: cancel a run in an allocation instead, which its user holds to start the next.
    """
    try:
        yield
    except KeyboardInterrupt:
        if cancels_in_allocation and is_step_id(records[0].job_id or ""):
            output.note(cancel_in_allocation(context, records[0]))
            raise
        jobs = words_for_all(context, records)
        if len(records) == 1:
            output.note(f"the job continues; dtslurm logs -f {jobs} follows it again")
        else:
            output.note(f"the jobs continue; dtslurm status {jobs} shows them")
        raise


@contextmanager
def _open_screen(record: JobRecord, *, on_stderr: bool, fold: bool | None) -> Iterator[Screen]:
    if not on_stderr and output.is_terminal():
        with open_live_screen(record, fold=fold is not False) as screen:
            yield screen
    else:
        yield make_screen(on_stderr=on_stderr, fold=bool(fold))


def make_screen(*, on_stderr: bool = False, fold: bool | None = None) -> PlainScreen | TerminalScreen:
    """Return a screen without progress: folded or on a terminal a `TerminalScreen`, else a `PlainScreen`."""
    stream = sys.stderr if on_stderr else sys.stdout
    terminal = not on_stderr and output.is_terminal()
    if not terminal and not fold:
        return PlainScreen(stream)
    return TerminalScreen(stream, fold=fold is not False, colours=terminal and output.has_colours())
