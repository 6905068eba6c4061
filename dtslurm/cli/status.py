"""``dtslurm status``."""

from __future__ import annotations

from typing import Any

import click

from dtslurm.cli import offers, output
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.status_rows import full, rows
from dtslurm.errors import SlurmUnavailable
from dtslurm.services.context import Context
from dtslurm.services.runs import find, recent, words_for
from dtslurm.services.status import RunView, views
from dtslurm.services.tasks import only, task_of

_COLOURS = {
    "RUNNING": "green",
    "COMPLETED": "dim",
    "FAILED": "bold red",
    "TIMEOUT": "red",
    "CANCELLED": "yellow",
}
_COLUMNS = ("JOB", "NAME", "CLUSTER", "STATE", "RANKS", "TIME", "NODES", "ABOUT")
_NARROW = 120  # below, a terminal gets what matters most


@click.command()
@click.option(
    "-n", "--limit", metavar="N", type=click.IntRange(min=1), default=20, help="How many runs. [default: 20]"
)
@cluster_option
@json_option
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=offers.jobs)
def status(limit: int, cluster: str | None, as_json: bool, jobs: tuple[str, ...]) -> None:
    """Show your newest runs, or all of the runs named by JOB: job id, array task (17_3), run name, token or
    run directory.

    An answer of the scheduler serves every window of yours for a few seconds; --json tells when it was asked.
    Exits with 3 if a scheduler could not be asked: what is shown is then what was heard last.
    """
    context = Context()
    records = [find(context, job, cluster) for job in jobs] if jobs else recent(context, limit, cluster)
    tasks = [task_of(job, record) for job, record in zip(jobs, records, strict=True)] if jobs else []
    found = views(context, records)
    if jobs:
        found = [only(view, task) for view, task in zip(found, tasks, strict=True)]
    if as_json:
        output.document(runs=[_values(context, view, in_full=bool(jobs)) for view in found])
    elif jobs:
        _show_full(context, found)
    elif found:
        _show_table(found, context.clock())
    else:
        output.note(f"no runs{f' on {cluster}' if cluster else ''} yet; dtslurm submit SCRIPT starts one")
    if any(view.trouble for view in found):
        raise StateUnknown


class StateUnknown(SlurmUnavailable):
    """A scheduler could not be asked, which was told already; only the exit code is left to pass on."""

    def __init__(self) -> None:
        super().__init__("a scheduler could not be asked")

    def lines(self) -> list[str]:
        """Return nothing more to say."""
        return []


def _values(context: Context, view: RunView, *, in_full: bool) -> dict[str, Any]:
    asked = view.observed_at
    values = {
        "record": view.record,
        "statuses": view.statuses,
        "trouble": view.trouble,
        "observed_at": asked,
        "age_s": None if asked is None else round(max(0.0, context.clock() - asked), 1),
    }
    if in_full:
        from dtslurm.services.history import history

        told = history(context, view)
        values |= {"attempts": told.attempts, "events": told.events}
    return values


def _show_full(context: Context, found: list[RunView]) -> None:
    from dtslurm.services.chain import chain
    from dtslurm.services.history import history

    for number, view in enumerate(found):
        if number:
            output.say()
        stages = chain(context, view.record) if view.record.stages else []
        job = words_for(context, view.record)
        for line in full(view, history(context, view), context.clock(), output.width(), stages, job):
            output.say(line)


def _show_table(found: list[RunView], now: float) -> None:
    width = output.width()
    columns = list(range(len(_COLUMNS)))
    if width is not None and width < _NARROW:
        several = len({view.record.cluster for view in found}) > 1
        columns = [0, 1, *([2] if several else []), 3, 5, 7]
    cells = [row for view in found for row in rows(view, now)]
    output.table(
        [_COLUMNS[column] for column in columns],
        [[row[column] for column in columns] for row in cells],
        _COLOURS,
    )
    troubles = {f"{view.record.cluster}: {view.trouble}": view for view in found if view.trouble}
    for text, view in troubles.items():
        old = f"; last heard {output.duration(now - view.observed_at)} ago" if view.observed_at else ""
        output.note(text + old)
