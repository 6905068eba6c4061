"""Jobs of ours in the queue whose run has no record that can be read: shown by what the queue knows."""

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
_MOST_READ = 100  # records that are read to find those that cannot be
_ID_OR_TOKEN = re.compile(r"\d{1,15}|[0-9a-f]{12}")
_MARK = re.compile(rf"{OUR_MARK}([0-9a-f]+)(?::([0-9a-f]+))?")


class QueuedJobs(NamedTuple):
    """What the queue lists beside the runs that are shown.

    Attributes:
        views: runs whose record cannot be read.
        hidden: how many runs with a record wait or run, and are not among those shown.
        troubles: why clusters could not be asked, by cluster; those that the shown runs tell of are left out.
    """

    views: list[RunView]
    hidden: int
    troubles: dict[str, str]


def describe_unrecorded(view: RunView) -> str:
    """Return why the record of a run cannot be read, and the command that ends its job if it has one."""
    record = view.record
    which = f"job {record.job_id}" if record.job_id else f"run {record.name}"
    text = f"{which}: the record of the run cannot be read: {view.record_problem}"
    command = cancel_command(view)
    return f"{text}; {command} ends the job" if command else text


def cancel_command(view: RunView) -> str:
    """Return the command that ends a job without a record that can be read; empty if there is none to end."""
    record = view.record
    if view.terminal or not record.job_id:
        return ""
    return f"dtslurm cancel {record.job_id} --cluster {shlex.quote(record.cluster)}"


def find_queued_jobs(
    context: Context, found: Sequence[RunView], cluster: str | None = None, need: Freshness | None = None
) -> QueuedJobs:
    """Return what the queue lists of ours beside the runs that are shown.

    The clusters that are asked are those of runs that have not ended, and the default one if it is on this
    machine. An answer of the last seconds serves, so that mostly nothing more is asked than for ``found``.

    Args:
        found: the runs that are shown already.
        cluster: only jobs of this cluster.
        need: what an answer of the scheduler must be good for, as for runs that a user asks about by default.
    """
    rows = _rows(context, cluster)
    need = need or Freshness()
    shown = {view.record.token for view in found}
    open_rows = [row for row in rows if not row.ended and row.token not in shown]
    unreadable = {
        row.token: problem for row in open_rows[:_MOST_READ] if (problem := explain_unreadable(row))
    }
    views: list[RunView] = []
    hidden, troubles = 0, {}
    for place, trouble in _clusters(
        context, found, [row for row in rows if row.token in unreadable], cluster
    ):
        known = {row.token: row for row in rows if row.cluster == place.name}
        waiting = [row.job_id for token in unreadable if (row := known.get(token)) is not None and row.job_id]
        ids = waiting if need.background else []  # they tell when to ask again
        heard = QueueSnapshot(trouble=trouble) if trouble else observe(context, place, ids, need)
        by_token = _by_token(heard.own_jobs)
        if heard.trouble and not trouble:
            troubles[place.name] = heard.trouble
        for token, statuses in by_token.items():
            if token in shown:
                continue
            shown.add(token)
            row = known.get(token)
            if row is None and all(status.terminal for status in statuses):
                continue  # a run of another machine, which has ended
            problem = (unreadable.get(token) or explain_unreadable(row)) if row is not None else NO_RECORD
            if problem:
                views.append(_view(context, place, row, statuses, problem, heard))
            elif any(not status.terminal for status in statuses):
                hidden += 1
        missing = [known[token] for token in unreadable if token in known and token not in by_token]
        if heard.trouble:
            views += [_view(context, place, row, (), unreadable[row.token], heard) for row in missing]
        elif missing and heard.observed_at is not None:
            with contextlib.suppress(StoreError):
                context.index.mark_ended(row.token for row in missing)
    return QueuedJobs(views, hidden, troubles)


def find_queued_job(context: Context, selector: str, cluster: str | None = None) -> RunView | None:
    """Return the job of ours in the queue that a job id, token or run name means; None if there is none.

    Raises:
        SlurmUnavailable: the index knows the run, and the scheduler does not answer.
    """
    job = array_of_task(selector) or selector
    rows = [
        row for row in _rows(context, cluster) if job in {row.token, row.job_id, row.name, row.folder.name}
    ]
    if not rows and not _ID_OR_TOKEN.fullmatch(job):
        return None
    for name in dict.fromkeys([*(row.cluster for row in rows), cluster]):
        try:
            place = context.cluster(name)
        except DtslurmError:  # its profile is gone
            continue
        if not isinstance(place.scheduler, QueueLister):
            continue
        heard = observe(context, place, (), Freshness())
        known = {row.token: row for row in rows if row.cluster == place.name}
        if heard.trouble and known:
            raise SlurmUnavailable(
                f"the record of {selector} cannot be read, and {place.name} could not be asked for its job",
                evidence=[explain_unreadable(rows[0]), heard.trouble],
            )
        for token, statuses in _by_token(heard.own_jobs).items():
            if token in {*known, job} or any(matches_job_id(one.job_id, job) for one in statuses):
                row = known.get(token) or _row_of(context, token)
                problem = explain_unreadable(row) if row is not None else NO_RECORD
                if problem:
                    return _view(context, place, row, statuses, problem, heard)
    return None


def _row_of(context: Context, token: str) -> IndexRow | None:
    return next((row for row in _rows(context, None) if row.token == token), None)


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


def _rows(context: Context, cluster: str | None) -> list[IndexRow]:
    try:
        return context.index.rows(cluster)
    except StoreError:  # the queue alone tells then
        return []


def _clusters(
    context: Context, found: Sequence[RunView], rows: Sequence[IndexRow], cluster: str | None
) -> Iterator[tuple[ActiveCluster, str]]:
    """Yield each cluster to ask, and why it did not answer just now, empty if it did."""
    seen: set[tuple[str, bool]] = set()
    for place, trouble in _candidates(context, found, rows, cluster):
        key = place.name, place.remote
        if key not in seen and isinstance(place.scheduler, QueueLister):
            seen.add(key)
            yield place, trouble


def _candidates(
    context: Context, found: Sequence[RunView], rows: Sequence[IndexRow], cluster: str | None
) -> Iterator[tuple[ActiveCluster, str]]:
    asked = [view for view in found if view.trouble or not view.terminal]
    for view in sorted(asked, key=lambda view: not view.trouble):
        with contextlib.suppress(DtslurmError):
            yield context.cluster_of(view.record), view.trouble
    for name in dict.fromkeys(row.cluster for row in rows):
        with contextlib.suppress(DtslurmError):  # its profile is gone
            yield context.cluster(name), ""
    with contextlib.suppress(DtslurmError):
        place = context.cluster(cluster)
        if not place.remote:
            yield place, ""


def _by_token(jobs: Sequence[JobStatus]) -> Mapping[str, list[JobStatus]]:
    groups: dict[str, list[JobStatus]] = defaultdict(list)
    for job in jobs:
        for token in dict.fromkeys(found[1] for found in _MARK.finditer(job.comment)):
            groups[token].append(job)
    return groups


def _view(
    context: Context,
    place: ActiveCluster,
    row: IndexRow | None,
    statuses: Sequence[JobStatus],
    problem: str,
    heard: QueueSnapshot,
) -> RunView:
    """Return a run as the queue and the index know it."""
    first = statuses[0] if statuses else None
    mark = _MARK.search(first.comment) if first is not None else None
    token = row.token if row is not None else mark[1] if mark else ""
    job_id = base_id(first.job_id) if first is not None else row.job_id if row is not None else None
    submitted = [one.submit_time for one in statuses if one.submit_time is not None]
    folder = str(row.folder) if row is not None else ""
    record = JobRecord(
        token=token,
        script_hash=(mark[2] or "") if mark else "",
        cluster=place.name,
        name=row.name if row is not None else first.name if first is not None else "",
        run_dir="" if place.remote else folder,
        mirror=(folder or str(mirrors(context) / token)) if place.remote else "",
        phase=UNRECORDED,
        created_at=row.created_at if row is not None else float(min(submitted, default=context.clock())),
        profile=str(place.path),
        transport=place.way,
        job_id=job_id,
        array="" if any("_" in one.job_id for one in statuses) else None,
    )
    if not statuses:
        reason = "the scheduler could not be asked"
        statuses = [JobStatus(job_id=job_id or "", state=JobState.UNKNOWN, name=record.name, reason=reason)]
    return RunView(record, tuple(statuses), heard.trouble, heard.observed_at, record_problem=problem)
