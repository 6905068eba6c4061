"""``dtslurm logs``."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from dtslurm.cli.follow import follow_to_end, make_screen
from dtslurm.cli.options import cluster_option, job_argument, json_option, parse_ranks
from dtslurm.cli.printing import output
from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.logs.lines import LogBlock
from dtslurm.logs.stamps import point_in_time
from dtslurm.model.jobs.job import JobRecord, LogLine
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.services.logs.logs import LogFilter, follow, read
from dtslurm.services.runs.roles import role_names
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.runs.tasks import select_task_view, task_of
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name


@click.command()
@click.option("-f", "--follow", "following", is_flag=True, help="Follow the output until the run ends.")
@click.option("--rank", "ranks", metavar="SET", help="Show only these ranks, such as 0,3-7.")
@click.option("--role", "roles", metavar="NAMES", help="Show only these roles, such as rollout,judge.")
@click.option("--node", metavar="HOSTS", help="Show only ranks of these nodes, such as gpu[01-04].")
@click.option("--grep", metavar="REGEX", help="Show only lines that match.")
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="K", help="Show only this attempt. [default: the latest]"
)
@click.option(
    "-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Show only the last N lines of each rank."
)
@click.option(
    "--since", metavar="TIME", help="Show only lines from TIME on, if lines have timestamps: 10m, 14:05."
)
@click.option("--until", metavar="TIME", help="Show only lines up to TIME, if lines have timestamps.")
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Fold equal lines of several ranks into one line. [default: on a terminal]",
)
@cluster_option
@json_option
@job_argument
def logs(
    following: bool,
    ranks: str | None,
    roles: str | None,
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
    """Show the output of JOB (or of the newest run): batch script, launcher of each node, ranks."""
    context = Context()
    record = find(context, job, cluster)
    if job is None:
        output.note(f"the newest run: job {record.job_id} ({record.name})")
    record = _require_job(context, record)
    log_filter = LogFilter(
        roles=_parse_roles(record, roles, ranks or node),
        ranks=parse_ranks(ranks),
        nodes=_parse_nodes(node),
        grep=_compile_pattern(grep),
        attempt=attempt,
        tail=tail,
        task=task_of(job, record),
        since=_parse_time("--since", since, context.clock()),
        until=_parse_time("--until", until, context.clock()),
    )
    if following:
        _check_follow(context, record, log_filter)
    if as_json:
        _print_json(context, record, log_filter, following=following)
    elif following:
        follow_to_end(context, record, log_filter, fold=fold)
    else:
        _show(context, record, log_filter, fold, node)


def _print_json(context: Context, record: JobRecord, log_filter: LogFilter, *, following: bool) -> None:
    if not following:
        _check_attempt(record, log_filter)
    batches = follow(context, record, log_filter) if following else read(context, record, log_filter)
    lines: list[LogLine] = []
    for items in batches:
        for item in items:
            if isinstance(item, LogBlock):
                lines += item.lines()
    if not lines and not following:
        _raise_if_problem(_describe_missing_parts(views(context, [record])[0], log_filter))
    output.document(job_id=record.job_id, lines=lines)


def _show(
    context: Context, record: JobRecord, log_filter: LogFilter, fold: bool | None, node: str | None
) -> None:
    _check_attempt(record, log_filter)
    screen = make_screen(fold=fold)
    for items in read(context, record, log_filter, in_turn=screen.folds):
        screen.show(items)
    screen.end()
    if screen.has_output:
        return
    view = views(context, [record])[0]
    _raise_if_problem(_describe_missing_parts(view, log_filter))
    if not log_filter.picks_lines:
        output.note(_explain_no_output(view, log_filter, node))


def _require_job(context: Context, record: JobRecord) -> JobRecord:
    """Return the record, completed with the job id if the submission's answer was lost."""
    if record.job_id is not None:
        return record
    view = views(context, [record])[0]
    if view.record.job_id is None:
        raise JobNotFound(f"run {record.token} has no output: {view.trouble or view.statuses[0].reason}")
    return view.record


def _raise_if_problem(problem: str) -> None:
    if problem:
        raise JobNotFound(problem)


def _check_attempt(record: JobRecord, log_filter: LogFilter) -> None:
    """Raise an error for a missing attempt before the batch script's lines, which belong to all attempts, are
    shown.

    Local copies of a remote run may be outdated, so for these the check is made afterwards.
    """
    if not record.mirror:
        _raise_if_problem(_describe_missing_attempt(record, log_filter))


def _check_follow(context: Context, record: JobRecord, log_filter: LogFilter) -> None:
    """Raise an error for ranks that cannot exist, and for a missing attempt of an ended run."""
    _raise_if_problem(_describe_missing_ranks(record, log_filter))
    if log_filter.attempt is not None:
        view = select_task_view(views(context, [record])[0], log_filter.task)
        if view.terminal:
            _raise_if_problem(_describe_missing_attempt(view.record, log_filter))


def _describe_missing_attempt(record: JobRecord, log_filter: LogFilter) -> str:
    run = RunDir(Path(record.folder))
    attempts = ((log_filter.task and run.task(log_filter.task)) or run).attempts()
    if log_filter.attempt is None or not attempts or log_filter.attempt in attempts:
        return ""
    return f"the run has no attempt {log_filter.attempt}, only {', '.join(map(str, attempts))}"


def _describe_missing_ranks(record: JobRecord, log_filter: LogFilter) -> str:
    size = record.world_size
    if log_filter.ranks is None or any(first < size for first, _ in log_filter.ranks):
        return ""
    requested = ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in log_filter.ranks
    )
    return f"the run has no rank {requested}, only {f'0-{size - 1}' if size > 1 else '0'}"


def _describe_missing_parts(view: RunView, log_filter: LogFilter) -> str:
    """Return an error message if the requested attempt or ranks are known not to exist, else an empty one."""
    return _describe_missing_ranks(view.record, log_filter) or _describe_missing_attempt(
        view.record, log_filter
    )


def _explain_no_output(view: RunView, log_filter: LogFilter, node: str | None) -> str:
    """Explain why there is no output."""
    state = f"the job is {view.statuses[0].word}"
    if log_filter.nodes is not None:
        node_text = fold_nodes(view.statuses[0].nodelist)
        return f"no output on {node}; {state}{f' on {node_text}' if node_text else ''}"
    return f"no output yet; {state}" if not view.terminal else f"no output; {state}"


def _parse_roles(record: JobRecord, text: str | None, other_filter: str | None) -> frozenset[str] | None:
    """Return the names of the roles whose output to show, None for the output of the main role.

    Raises:
        RequestInvalid: the run has no such role, or the selection contradicts another one.
    """
    if text is None:
        return None
    if other_filter is not None:
        raise RequestInvalid(
            ["--role shows instances of roles, and --rank and --node select ranks: give one"]
        )
    main, others = role_names(record)
    names = [name for name in text.split(",") if name]
    if names == [main]:
        return None
    if not others:
        raise RequestInvalid([f"--role {text}: the run has only one role"])
    if not names:
        raise RequestInvalid([f"--role {text!r} names no role; the run has {', '.join(others)}"])
    for name in names:
        if name == main:
            raise RequestInvalid([f"--role {name}: show the output of the main role by itself"])
        if name not in others:
            raise RequestInvalid([f"--role {name}: the run has no such role{suggest_name(name, others)}"])
    return frozenset(names)


def _parse_nodes(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return frozenset(NodeSet(text))
    except NodeSetException as error:
        raise RequestInvalid([f"--node {text!r} is not a node set: {error}"]) from error


def _parse_time(option: str, text: str | None, now: float) -> float | None:
    if text is None:
        return None
    try:
        return point_in_time(text, now, time.localtime().tm_gmtoff)
    except ValueError as error:
        raise RequestInvalid(
            [f"{option} {text!r} is not a time: write 10m (ago), 14:05 or 2026-11-21 14:05"]
        ) from error


def _compile_pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestInvalid([f"--grep {text!r} is not a regular expression: {error}"]) from error
