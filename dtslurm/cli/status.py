"""``dtslurm status``."""

from __future__ import annotations

import time
from typing import Any

import click

from dtslurm.cli import output
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.model.state import JobState, JobStatus
from dtslurm.services.context import Context
from dtslurm.services.status import RunView, find, recent, views
from dtslurm.slurm.pending import explain

_COLOURS = {
    "RUNNING": "green",
    "COMPLETED": "dim",
    "FAILED": "bold red",
    "TIMEOUT": "red",
    "CANCELLED": "yellow",
}
_COLUMNS = ("JOB", "NAME", "CLUSTER", "STATE", "RANKS", "TIME", "NODES", "ABOUT")


@click.command()
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, help="How many runs. [default: 20]")
@cluster_option
@json_option
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
def status(limit: int, cluster: str | None, as_json: bool, jobs: tuple[str, ...]) -> None:
    """Show your newest runs, or the runs named by JOB: job id, run name, token or run directory."""
    context = Context()
    records = [find(context, job, cluster) for job in jobs] if jobs else recent(context, limit, cluster)
    found = views(context, records)
    if as_json:
        output.document(runs=[_values(view) for view in found])
        return
    if not found:
        output.note("no runs yet; dtslurm submit SCRIPT starts one")
        return
    rows = [row for view in found for row in _rows(view, time.time())]
    output.table(_COLUMNS, rows, _COLOURS)
    for view in found:
        if view.trouble:
            output.note(f"{view.record.cluster}: {view.trouble}")
    if jobs:
        _explain(found)


def _values(view: RunView) -> dict[str, Any]:
    return {"record": view.record, "statuses": view.statuses, "trouble": view.trouble}


def _rows(view: RunView, now: float) -> list[list[str]]:
    """Return one row for a run; for an array, one for each state its tasks are in."""
    groups: dict[str, list[JobStatus]] = {}
    for item in view.statuses:
        groups.setdefault(item.word, []).append(item)
    return [_row(view, word, items, now) for word, items in groups.items()]


def _row(view: RunView, word: str, items: list[JobStatus], now: float) -> list[str]:
    record, first = view.record, items[0]
    job = record.job_id or "?"
    if record.array is not None:
        job = first.job_id if len(items) == 1 else f"{job} ({len(items)} tasks)"
    end = first.end_time if first.end_time is not None else now
    span = end - first.start_time if first.start_time is not None and len(items) == 1 else None
    return [
        job,
        record.name,
        record.cluster,
        word,
        str(record.world_size),
        output.duration(span),
        first.nodelist or "-",
        _about(view, items),
    ]


def _about(view: RunView, items: list[JobStatus]) -> str:
    status = items[0]
    if status.state is JobState.PENDING and status.reason not in ("", "None"):
        return status.reason
    if status.state is JobState.UNKNOWN:
        return status.reason or "no evidence"
    if status.terminal and not status.ok:
        attempts = view.run.attempts()
        failure = view.run.first_failure(attempts[-1]) if attempts else None
        if failure:
            return f"rank {failure[0]} failed first, exit code {failure[1]}"
        code = f"exit code {status.exit_code}" if status.exit_code else ""
        return code or (f"signal {status.signal}" if status.signal else status.reason)
    if status.restarts:
        return f"attempt {status.restarts}"
    return ""


def _explain(found: list[RunView]) -> None:
    """Say in words why runs asked for by name wait, and where they keep their files."""
    for view in found:
        for item in view.statuses:
            if item.state is JobState.PENDING and item.reason not in ("", "None"):
                said = explain(item.reason)
                never = "it will never start as it is" if said.will_start is False else ""
                output.note(f"{item.job_id}: {'; '.join(filter(None, (said.text, never, said.fix)))}")
        output.note(f"{view.record.job_id}: {view.record.run_dir}")
