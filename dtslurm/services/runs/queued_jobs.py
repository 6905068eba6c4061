"""Jobs of dtslurm in the queue whose run has no readable record, described from the queue and the index."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtslurm.errors import DtslurmError, SlurmUnavailable, StoreError
from dtslurm.model.runs.record import OUR_MARK, JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.base import QueueLister
from dtslurm.services.runs.monitor import Freshness, QueueSnapshot, observe
from dtslurm.services.runs.records import mirrors
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm.arrays import array_of_task, base_id, matches_job_id
from dtslurm.store.index import IndexRow
from dtslurm.store.rundir import RunDir

UNRECORDED = "unrecorded"
UNREADABLE = "no record of the run can be read"
NO_RECORD = "this machine has no record of the run; another machine or another run root may have it"
_MOST_RECORDS_READ = 100  # upper limit of records that are read to find unreadable ones
_ID_OR_TOKEN = re.compile(r"\d{1,15}|[0-9a-f]{12}")
_MARK = re.compile(rf"{OUR_MARK}([0-9a-f]+)(?::([0-9a-f]+))?")


class QueuedJobs(NamedTuple):
    """The jobs of dtslurm in the queue that do not belong to the runs already shown.

    Attributes:
        views: runs whose record cannot be read.
        hidden: number of pending or running runs that have a readable record and are not shown.
        troubles: why clusters could not be queried, by cluster, without those that the shown runs report.
    """

    views: list[RunView]
    hidden: int
    troubles: dict[str, str]


def describe_unrecorded(view: RunView) -> str:
    """Describe why the record of a run cannot be read, with the command that cancels its job if any."""
    record = view.record
    label = f"job {record.job_id}" if record.job_id else f"run {record.name}"
    text = f"{label}: the record of the run cannot be read: {view.record_problem}"
    command = cancel_command(view)
    return f"{text}; {command} ends the job" if command else text


def cancel_command(view: RunView) -> str:
    """Return the command that cancels a job without a readable record; empty if no job can be running."""
    record = view.record
    if view.terminal or not record.job_id:
        return ""
    return f"dtslurm cancel {record.job_id} --cluster {shlex.quote(record.cluster)}"


def find_queued_jobs(
    context: Context,
    known_views: Sequence[RunView],
    cluster: str | None = None,
    freshness: Freshness | None = None,
) -> QueuedJobs:
    """Find the jobs of dtslurm in the queue that do not belong to the runs already shown.

    The queried clusters are those of runs that have not ended, and the default cluster if it is local. The
    cached queue snapshot is used, so usually no query is made beyond those for ``known_views``.

    Args:
        known_views: the runs that are shown already.
        cluster: only jobs of this cluster.
        freshness: the required freshness of the scheduler's answer; a foreground query by default.
    """
    rows = _read_index_rows(context, cluster)
    freshness = freshness or Freshness()
    shown_tokens = {view.record.token for view in known_views}
    open_rows = [row for row in rows if not row.ended and row.token not in shown_tokens]
    problems_by_token = {
        row.token: problem for row in open_rows[:_MOST_RECORDS_READ] if (problem := explain_unreadable(row))
    }
    views: list[RunView] = []
    hidden_count, errors_by_cluster = 0, {}
    for active_cluster, query_error in _clusters_to_query(
        context, known_views, [row for row in rows if row.token in problems_by_token], cluster
    ):
        rows_by_token = {row.token: row for row in rows if row.cluster == active_cluster.name}
        waiting_ids = [
            row.job_id
            for token in problems_by_token
            if (row := rows_by_token.get(token)) is not None and row.job_id
        ]
        ids = waiting_ids if freshness.background else []  # they set the query interval
        snapshot = (
            QueueSnapshot(trouble=query_error)
            if query_error
            else observe(context, active_cluster, ids, freshness)
        )
        by_token = _group_by_token(snapshot.own_jobs)
        if snapshot.trouble and not query_error:
            errors_by_cluster[active_cluster.name] = snapshot.trouble
        for token, statuses in by_token.items():
            if token in shown_tokens:
                continue
            shown_tokens.add(token)
            row = rows_by_token.get(token)
            if row is None and all(status.terminal for status in statuses):
                continue  # an ended run of another machine
            problem = (
                (problems_by_token.get(token) or explain_unreadable(row)) if row is not None else NO_RECORD
            )
            if problem:
                views.append(_make_view(context, active_cluster, row, statuses, problem, snapshot))
            elif any(not status.terminal for status in statuses):
                hidden_count += 1
        missing = [
            rows_by_token[token]
            for token in problems_by_token
            if token in rows_by_token and token not in by_token
        ]
        if snapshot.trouble:
            views += [
                _make_view(context, active_cluster, row, (), problems_by_token[row.token], snapshot)
                for row in missing
            ]
        elif missing and snapshot.observed_at is not None:
            with contextlib.suppress(StoreError):
                context.index.mark_ended(row.token for row in missing)
    return QueuedJobs(views, hidden_count, errors_by_cluster)


def find_queued_job(context: Context, selector: str, cluster: str | None = None) -> RunView | None:
    """Find the job of dtslurm in the queue by job id, token or run name; None if there is none.

    Raises:
        SlurmUnavailable: the index contains the run, and the scheduler does not answer.
    """
    job = array_of_task(selector) or selector
    rows = [
        row
        for row in _read_index_rows(context, cluster)
        if job in {row.token, row.job_id, row.name, row.folder.name}
    ]
    if not rows and not _ID_OR_TOKEN.fullmatch(job):
        return None
    for name in dict.fromkeys([*(row.cluster for row in rows), cluster]):
        try:
            active = context.cluster(name)
        except DtslurmError:  # the cluster no longer has a profile
            continue
        if not isinstance(active.scheduler, QueueLister):
            continue
        snapshot = observe(context, active, (), Freshness())
        rows_by_token = {row.token: row for row in rows if row.cluster == active.name}
        if snapshot.trouble and rows_by_token:
            raise SlurmUnavailable(
                f"the record of {selector} cannot be read, and the scheduler of {active.name} could "
                "not be queried for its job",
                evidence=[explain_unreadable(rows[0]), snapshot.trouble],
            )
        for token, statuses in _group_by_token(snapshot.own_jobs).items():
            if token in {*rows_by_token, job} or any(
                matches_job_id(status.job_id, job) for status in statuses
            ):
                row = rows_by_token.get(token) or _find_row(context, token)
                problem = explain_unreadable(row) if row is not None else NO_RECORD
                if problem:
                    return _make_view(context, active, row, statuses, problem, snapshot)
    return None


def _find_row(context: Context, token: str) -> IndexRow | None:
    return next((row for row in _read_index_rows(context, None) if row.token == token), None)


def explain_unreadable(row: IndexRow) -> str:
    """Return why a run's record cannot be read; empty if it can."""
    run = RunDir(row.folder)
    try:
        run.load()
    except StoreError as error:
        if _is_missing(row.folder):
            return f"its run directory {row.folder} does not exist: it was moved or deleted"
        if _is_missing(run.record_path):
            return f"its record {run.record_path} does not exist"
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return ""


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _read_index_rows(context: Context, cluster: str | None) -> list[IndexRow]:
    try:
        return context.index.rows(cluster)
    except StoreError:  # then only the queue is used
        return []


def _clusters_to_query(
    context: Context, known_views: Sequence[RunView], rows: Sequence[IndexRow], cluster: str | None
) -> Iterator[tuple[ActiveCluster, str]]:
    """Yield each cluster to query, with the error of its last query; empty if that succeeded."""
    keys: set[tuple[str, bool]] = set()
    for active_cluster, query_error in _candidate_clusters(context, known_views, rows, cluster):
        key = active_cluster.name, active_cluster.remote
        if key not in keys and isinstance(active_cluster.scheduler, QueueLister):
            keys.add(key)
            yield active_cluster, query_error


def _candidate_clusters(
    context: Context, known_views: Sequence[RunView], rows: Sequence[IndexRow], cluster: str | None
) -> Iterator[tuple[ActiveCluster, str]]:
    relevant_views = [view for view in known_views if view.trouble or not view.terminal]
    for view in sorted(relevant_views, key=lambda view: not view.trouble):
        with contextlib.suppress(DtslurmError):
            yield context.cluster_of(view.record), view.trouble
    for name in dict.fromkeys(row.cluster for row in rows):
        with contextlib.suppress(DtslurmError):  # the cluster no longer has a profile
            yield context.cluster(name), ""
    with contextlib.suppress(DtslurmError):
        active_cluster = context.cluster(cluster)
        if not active_cluster.remote:
            yield active_cluster, ""


def _group_by_token(jobs: Sequence[JobStatus]) -> Mapping[str, list[JobStatus]]:
    groups: dict[str, list[JobStatus]] = defaultdict(list)
    for job in jobs:
        for token in dict.fromkeys(match[1] for match in _MARK.finditer(job.comment)):
            groups[token].append(job)
    return groups


def _make_view(
    context: Context,
    cluster: ActiveCluster,
    row: IndexRow | None,
    statuses: Sequence[JobStatus],
    problem: str,
    snapshot: QueueSnapshot,
) -> RunView:
    """Return the view of a run from its queue entries and its index row."""
    first_status = statuses[0] if statuses else None
    mark = _MARK.search(first_status.comment) if first_status is not None else None
    token = row.token if row is not None else mark[1] if mark else ""
    job_id = (
        base_id(first_status.job_id) if first_status is not None else row.job_id if row is not None else None
    )
    submit_times = [status.submit_time for status in statuses if status.submit_time is not None]
    folder = str(row.folder) if row is not None else ""
    record = JobRecord(
        token=token,
        script_hash=(mark[2] or "") if mark else "",
        cluster=cluster.name,
        name=row.name if row is not None else first_status.name if first_status is not None else "",
        run_dir="" if cluster.remote else folder,
        mirror=(folder or str(mirrors(context) / token)) if cluster.remote else "",
        phase=UNRECORDED,
        created_at=row.created_at if row is not None else float(min(submit_times, default=context.clock())),
        profile=str(cluster.path),
        transport=cluster.automatic_transport,
        job_id=job_id,
        array="" if any("_" in status.job_id for status in statuses) else None,
    )
    if not statuses:
        reason = "the scheduler could not be queried"
        statuses = [JobStatus(job_id=job_id or "", state=JobState.UNKNOWN, name=record.name, reason=reason)]
    return RunView(record, tuple(statuses), snapshot.trouble, snapshot.observed_at, record_problem=problem)
