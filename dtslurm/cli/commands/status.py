"""``dtslurm status``."""

from __future__ import annotations

import itertools
import sys
from typing import Any, NoReturn

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.status_rows import describe_queued_job, format_run, make_rows
from dtslurm.cli.printing.styles import style_of_state
from dtslurm.errors import JobNotFound, RequestInvalid, SlurmUnavailable, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.units import parse_past_time
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import duration
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.runs.queued_jobs import describe_unrecorded, find_queued_job, find_queued_jobs
from dtslurm.services.runs.run_times import duration_values
from dtslurm.services.runs.runs import find, recent, selector_arguments
from dtslurm.services.runs.select_runs import SORTS, parse_states, select_runs
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.runs.tasks import select_task_view, task_of
from dtslurm.services.wiring.context import Context

_COLUMNS = ("JOB", "NAME", "CLUSTER", "STATE", "RANKS", "AGE", "TIME", "NODES", "ABOUT")
_WATCH_S = 5.0
_NARROW = 120  # a narrower terminal gets only the most important columns


@click.command()
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    help="Show at most N runs. [default: 20]",
)
@click.option("--state", "states", default="", metavar="STATE,...", help="Show only runs in these states.")
@click.option(
    "--since", metavar="TIME", help="Show only runs that had not ended by then: 12h, 2d, 8w or 2026-01-31."
)
@click.option("--sort", type=click.Choice(SORTS), default="age", help="Sort the runs. [default: age]")
@click.option("--watch", is_flag=True, help="Print the list again every few seconds, until Ctrl-C.")
@cluster_option
@json_option
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=completers.complete_jobs)
def status(
    limit: int,
    states: str,
    since: str | None,
    sort: str,
    watch: bool,
    cluster: str | None,
    as_json: bool,
    jobs: tuple[str, ...],
) -> None:
    """Show your newest runs, or all runs named by JOB: job id, array task (17_3), run name, token or run
    directory.

    All your terminals share the scheduler's answer for a few seconds; --json has the time of the answer.
    Exits with 3 if a scheduler did not answer: the output then shows the last known states.
    """
    context = Context()
    selection = _Selection(
        limit, parse_states(states), _parse_since(since, context.clock()), sort, cluster, jobs
    )
    if watch:
        _watch(context, selection, as_json=as_json)
    run_views = selection.find_runs(context)
    if as_json:
        output.document(runs=[_json_values(context, view, in_full=bool(jobs)) for view in run_views])
    elif jobs:
        _show_full(context, run_views)
    elif run_views:
        _show_table(run_views, context.clock())
    elif states or since:
        output.note("no matching run; dtslurm status without --state and --since shows all runs")
    else:
        output.note(f"no runs{f' on {cluster}' if cluster else ''} yet; dtslurm submit SCRIPT starts one")
    if any(view.trouble for view in run_views):
        raise StateUnknown


@dataclass(frozen=True)
class _Selection:
    """The runs to show and their order, as given on the command line."""

    limit: int
    states: frozenset[str]
    since: float | None
    sort: str
    cluster: str | None
    jobs: tuple[str, ...]

    def find_runs(self, context: Context) -> list[RunView]:
        """Return the current views of the selected runs."""
        if self.jobs:
            return add_activity(self._find_named(context), context.clock())
        filtered = bool(self.states or self.since is not None)
        records = recent(context, sys.maxsize if filtered else self.limit, self.cluster)
        run_views = add_activity(views(context, records), context.clock())
        queued = find_queued_jobs(context, run_views, self.cluster)
        for name, trouble in queued.troubles.items():
            output.note(f"{name}: jobs without a run record on this machine are not shown: {trouble}")
        if queued.hidden and not filtered:
            output.note(
                f"older runs in the queue that are not shown: {queued.hidden}; "
                f"dtslurm status -n {len(run_views) + queued.hidden} shows more"
            )
        selected = select_runs(
            [*run_views, *queued.views], self.states, self.since, self.sort, context.clock()
        )
        number = itertools.count(1)
        return [view for view in selected if view.record_problem or next(number) <= self.limit]

    def _find_named(self, context: Context) -> list[RunView]:
        """Return the named runs, including those that are only in the queue."""
        queued: dict[str, RunView] = {}
        records: dict[str, JobRecord] = {}
        for job in self.jobs:
            try:
                records[job] = find(context, job, self.cluster)
            except (JobNotFound, StoreError):
                view = find_queued_job(context, job, self.cluster)
                if view is None:
                    raise
                queued[job] = view
        recorded = dict(zip(records, views(context, list(records.values())), strict=True))
        views_by_job = {**queued, **recorded}
        return [
            select_task_view(views_by_job[job], task_of(job, views_by_job[job].record)) for job in self.jobs
        ]


def _parse_since(text: str | None, now: float) -> float | None:
    if text is None:
        return None
    try:
        return parse_past_time(text, now)
    except (ValueError, OverflowError):
        raise RequestInvalid([f"--since {text!r} is not a time: write 12h, 2d, 8w or 2026-01-31"]) from None


def _watch(context: Context, selection: _Selection, *, as_json: bool) -> NoReturn:
    """Show the table repeatedly until Ctrl-C, which exits with 0.

    Raises:
        RequestInvalid: there is no terminal, or JSON or single runs were requested.
    """
    if as_json or selection.jobs or not output.is_terminal():
        raise RequestInvalid(
            ["--watch needs a terminal, and shows only the list of runs"],
            hint="dtslurm top JOB watches one run; for scripts, call dtslurm status --json when you need it",
        )
    try:
        while True:
            run_views = selection.find_runs(context)
            click.clear()
            _show_table(run_views, context.clock())
            context.sleep(_WATCH_S)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(0) from None


class StateUnknown(SlurmUnavailable):
    """A scheduler query failed; the failure was already reported, so this error only sets the exit code."""

    def __init__(self) -> None:
        super().__init__("a scheduler could not be queried")

    def lines(self) -> list[str]:
        """Return no lines, because the failure was already reported."""
        return []


def _json_values(context: Context, view: RunView, *, in_full: bool) -> dict[str, Any]:
    observed_at = view.observed_at
    values = {
        "record": view.record,
        "statuses": view.statuses,
        "trouble": view.trouble,
        "record_problem": view.record_problem,
        "observed_at": observed_at,
        "age_s": None if observed_at is None else round(max(0.0, context.clock() - observed_at), 1),
        "activity": view.activities,
        "durations": duration_values(view, context.clock()),
    }
    if in_full and not view.record_problem:
        from dtslurm.services.runs.history import history

        run_history = history(context, view)
        values |= {"attempts": run_history.attempts, "events": run_history.events}
        values |= {"roles": run_history.roles} if run_history.roles else {}
        values["durations"] = duration_values(view, context.clock())
        values["activity"] = add_activity([view], context.clock())[0].activities
    return values


def _show_full(context: Context, run_views: list[RunView]) -> None:
    from dtslurm.services.runs.history import history
    from dtslurm.services.runs.stage_status import view_stages

    for number, run_view in enumerate(run_views):
        if number:
            output.say()
        if run_view.record_problem:
            for line in describe_queued_job(run_view, context.clock(), output.width()):
                output.say(line)
            continue
        stages = view_stages(context, run_view.record) if run_view.record.stages else []
        job = selector_arguments(context, run_view.record)
        run_history = history(context, run_view)  # this updates the local copies of remote files
        [view] = add_activity([run_view], context.clock())
        for line in format_run(view, run_history, context.clock(), output.width(), stages, job):
            output.say(line)


def _show_table(run_views: list[RunView], now: float) -> None:
    width = output.width()
    columns = list(range(len(_COLUMNS)))
    if width is not None and width < _NARROW:
        several_clusters = len({view.record.cluster for view in run_views}) > 1
        columns = [0, 1, *([2] if several_clusters else []), 3, 5, 6, 8]
    cells = [row for view in run_views for row in make_rows(view, now)]
    output.table(
        [_COLUMNS[column] for column in columns],
        [[row[column] for column in columns] for row in cells],
        {row[3]: style_of_state(row[3]) for row in cells},
    )
    for view in run_views:
        if view.record_problem:
            output.note(describe_unrecorded(view))
    troubles = {f"{view.record.cluster}: {view.trouble}": view for view in run_views if view.trouble}
    for text, view in troubles.items():
        age_text = f"; last update {duration(now - view.observed_at)} ago" if view.observed_at else ""
        output.note(text + age_text)
