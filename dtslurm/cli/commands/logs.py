"""``dtslurm logs``."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from dtslurm.cli.follow import follow_to_end, page
from dtslurm.cli.options import cluster_option, job_argument, json_option
from dtslurm.cli.printing import output
from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.logs.lines import LogBlock
from dtslurm.logs.stamps import point_in_time
from dtslurm.model.jobs.job import JobRecord, LogLine
from dtslurm.model.node_sets import fold_nodes
from dtslurm.services.logs.logs import LogFilter, follow, read
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.runs.tasks import only, task_of
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir


@click.command()
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the run is over.")
@click.option("--rank", "ranks", metavar="SET", help="Only these ranks, such as 0,3-7.")
@click.option("--node", metavar="HOSTS", help="Only ranks that ran on these nodes, such as gpu[01-04].")
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="K", help="Only this attempt. [default: the latest]"
)
@click.option(
    "-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each rank."
)
@click.option("--since", metavar="TIME", help="Only lines from then on, where they tell a time: 10m, 14:05.")
@click.option("--until", metavar="TIME", help="Only lines up to then, where they tell a time.")
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Equal lines of many ranks as one, or not. [default: on a terminal]",
)
@cluster_option
@json_option
@job_argument
def logs(
    following: bool,
    ranks: str | None,
    node: str | None,
    grep: str | None,
    attempt: int | None,
    tail: int | None,
    since: str | None,
    until: str | None,
    fold: bool | None,
    cluster: str | None,
    as_json: bool,
    job: str | None,
) -> None:
    """Show the output of JOB (or the newest run): the batch script, each node's launcher, every rank."""
    context = Context()
    record = find(context, job, cluster)
    if job is None:
        output.note(f"the newest run: job {record.job_id} ({record.name})")
    record = _with_a_job(context, record)
    wanted = LogFilter(
        ranks=_ranks(ranks),
        nodes=_nodes(node),
        grep=_pattern(grep),
        attempt=attempt,
        tail=tail,
        task=task_of(job, record),
        since=_time("--since", since, context.clock()),
        until=_time("--until", until, context.clock()),
    )
    if following:
        _refuse_to_follow(context, record, wanted)
    if as_json:
        _as_data(context, record, wanted, following=following)
    elif following:
        follow_to_end(context, record, wanted, fold=fold)
    else:
        _show(context, record, wanted, fold, node)


def _as_data(context: Context, record: JobRecord, wanted: LogFilter, *, following: bool) -> None:
    if not following:
        _refuse_attempt(record, wanted)
    found = follow(context, record, wanted) if following else read(context, record, wanted)
    lines: list[LogLine] = []
    for items in found:
        for item in items:
            if isinstance(item, LogBlock):
                lines += item.lines()
    if not lines and not following:
        _refuse(_lacking(views(context, [record])[0], wanted))
    output.document(job_id=record.job_id, lines=lines)


def _show(
    context: Context, record: JobRecord, wanted: LogFilter, fold: bool | None, node: str | None
) -> None:
    _refuse_attempt(record, wanted)
    screen = page(fold=fold)
    for items in read(context, record, wanted, in_turn=screen.folds):
        screen.show(items)
    screen.end()
    if screen.shown:
        return
    view = views(context, [record])[0]
    _refuse(_lacking(view, wanted))
    if not wanted.picks_lines:
        output.note(_nothing(view, wanted, node))


def _with_a_job(context: Context, record: JobRecord) -> JobRecord:
    """Return the record; of a submission whose answer was lost, with the job that came of it."""
    if record.job_id is not None:
        return record
    view = views(context, [record])[0]
    if view.record.job_id is None:
        raise JobNotFound(f"run {record.token} has no output: {view.trouble or view.statuses[0].reason}")
    return view.record


def _refuse(why: str) -> None:
    if why:
        raise JobNotFound(why)


def _refuse_attempt(record: JobRecord, wanted: LogFilter) -> None:
    """Refuse an attempt that there is none of, before the batch script's lines, which are of all of them.

    Copies of a far run's files may be older than its attempts: there it is said afterwards.
    """
    if not record.mirror:
        _refuse(_no_attempt(record, wanted))


def _refuse_to_follow(context: Context, record: JobRecord, wanted: LogFilter) -> None:
    """Refuse ranks that will never be, and an attempt that there is none of and that cannot come any more."""
    _refuse(_no_rank(record, wanted))
    if wanted.attempt is not None:
        view = only(views(context, [record])[0], wanted.task)
        if view.terminal:
            _refuse(_no_attempt(view.record, wanted))


def _no_attempt(record: JobRecord, wanted: LogFilter) -> str:
    run = RunDir(Path(record.folder))
    there = ((wanted.task and run.task(wanted.task)) or run).attempts()
    if wanted.attempt is None or not there or wanted.attempt in there:
        return ""
    return f"there is no attempt {wanted.attempt}, only {', '.join(map(str, there))}"


def _no_rank(record: JobRecord, wanted: LogFilter) -> str:
    size = record.world_size
    if wanted.ranks is None or any(first < size for first, _ in wanted.ranks):
        return ""
    asked = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in wanted.ranks)
    return f"there is no rank {asked}, only {f'0-{size - 1}' if size > 1 else '0'}"


def _lacking(view: RunView, wanted: LogFilter) -> str:
    """Say which attempt or ranks were asked for that the run has not, as far as that is known."""
    return _no_rank(view.record, wanted) or _no_attempt(view.record, wanted)


def _nothing(view: RunView, wanted: LogFilter, node: str | None) -> str:
    """Say why there is nothing to show."""
    state = f"the job is {view.statuses[0].word}"
    if wanted.nodes is not None:
        on = fold_nodes(view.statuses[0].nodelist)
        return f"nothing was written on {node}; {state}{f' on {on}' if on else ''}"
    return f"nothing written yet; {state}" if not view.terminal else f"nothing was written; {state}"


def _ranks(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    chosen = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise RequestInvalid([f"--rank {text!r}: write ranks and ranges like 0,3-7"])
        chosen.append((int(found[1]), int(found[2] or found[1])))
    return tuple(chosen)


def _nodes(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return frozenset(NodeSet(text))
    except NodeSetException as error:
        raise RequestInvalid([f"--node {text!r} names no nodes: {error}"]) from error


def _time(option: str, text: str | None, now: float) -> float | None:
    if text is None:
        return None
    try:
        return point_in_time(text, now, time.localtime().tm_gmtoff)
    except ValueError as error:
        raise RequestInvalid(
            [f"{option} {text!r} is no time: write 10m (ago), 14:05 or 2026-11-21 14:05"]
        ) from error


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestInvalid([f"--grep {text!r} is not a regular expression: {error}"]) from error
