"""Immutable rows of all runs of this user on all clusters, for the dashboard's run list."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.runs.monitor import Freshness
from dtslurm.services.runs.queued_jobs import UNREADABLE, describe_unrecorded, find_queued_jobs
from dtslurm.services.runs.run_evidence import attempt_number, describe_failure, list_warnings
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.pending import explain
from dtslurm.store.rundir import RunDir
from dtslurm.views.forecast import Forecast
from dtslurm.views.run_page import Page
from dtslurm.worker.lib.json_records import whole_number

ClusterKey = tuple[str, str, str]
_MAX_CLOCK_SKEW_S = 5  # allowed difference between Slurm's clock and the node's


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One run, one task of an array, or an array as a whole.

    Attributes:
        key: the run's token; for a task followed by ``_`` and its index.
        task: the array index; None for a run or a whole array.
        state: the state to show: Slurm's base state, or a flag such as COMPLETING that replaces it.
        ranks: number of ranks; 0 if unknown.
        recorded: whether the run's record can be read; else the row is built from the queue.
        over, ok: whether it has finally ended, and whether it succeeded.
        limit: Slurm's present time limit in seconds, else the limit at submission.
        time_left: seconds until the time limit at ``observed_at``; None if unknown.
        start, end: of the whole run, see `runs.run_times`; seconds since the epoch, None if unknown.
        job_start: when Slurm last started the job, from which the time limit counts.
        estimated_start: seconds since the epoch; None if unknown.
        about: text that explains why the job waits or how it ended.
        fix: what the user can do about it.
        never: whether the pending job will never start.
        tasks: for a whole array, the number of tasks in each state.
        attempt: number of earlier starts of the ranks.
        parent: name of the run directory of the run that it repeats or continues; empty if there is none.
        activity: the activity of a running job's ranks; None if unknown.
        losses: (step, loss) pairs of a running job; empty if unknown.
        observed_at: when the scheduler was queried, in seconds since the epoch.
    """

    key: str
    token: str
    job_id: str
    name: str
    cluster: str
    state: str
    task: str | None = None
    over: bool = False
    ok: bool = False
    unknown: bool = False
    recorded: bool = True
    pending: bool = False
    nodes: int | None = None
    gpus: int | None = None
    ranks: int = 1
    created: float = 0.0
    start: float | None = None
    end: float | None = None
    job_start: int | None = None
    estimated_start: int | None = None
    limit: int | None = None
    time_left: int | None = None
    reason: str = ""
    about: str = ""
    fix: str = ""
    never: bool = False
    nodelist: str = ""
    attempt: int = 0
    parent: str = ""
    tasks: tuple[tuple[str, int], ...] = ()
    run_dir: str = ""
    forecast: Forecast | None = None
    activity: Activity | None = None
    losses: tuple[tuple[float, float], ...] = ()
    observed_at: float = 0.0

    @property
    def limit_at(self) -> float | None:
        """When the job reaches its time limit, in epoch seconds; None if it does not run or has no limit."""
        began = self.start if self.job_start is None else self.job_start
        if self.over or self.pending:
            return None
        if self.time_left is not None:
            return self.observed_at + self.time_left
        return began + self.limit if began is not None and self.limit else None

    @property
    def requeued(self) -> bool:
        """Whether Slurm restarted the job after the run began, so that its time limit counts from then."""
        if self.job_start is None or self.start is None:
            return False
        return self.job_start > self.start + _MAX_CLOCK_SKEW_S

    @property
    def stalled(self) -> bool:
        """Whether the job runs and none of its ranks is active."""
        return self.state == JobState.RUNNING.value and self.activity is not None and self.activity.stalled

    @property
    def is_array(self) -> bool:
        """Whether this row stands for all tasks of an array."""
        return bool(self.tasks)


@dataclass(frozen=True, kw_only=True)
class ClusterLine:
    """The reachability of a cluster: time of its last answer, and the present error."""

    name: str
    observed_at: float | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Board:
    """The run list at one time, newest runs first; the tasks of an array follow the array's row."""

    rows: tuple[JobRow, ...] = ()
    clusters: tuple[ClusterLine, ...] = ()
    taken_at: float = 0.0


@dataclass
class Runs:
    """A reader of the user's run records that caches unchanged records."""

    context: Context
    limit: int = 500
    _entries: dict[Path, tuple[int, JobRecord]] = field(default_factory=dict)

    def by_cluster(self) -> dict[ClusterKey, list[JobRecord]]:
        """Return the runs that have not ended and the newest ended ones, by cluster, profile and transport.

        A cluster whose queue may contain jobs of runs without a readable record is included without runs.

        Raises:
            StoreError: the index cannot be read.
        """
        index = self.context.index
        unended_paths = dict.fromkeys(index.run_dirs(limit=None, include_ended=False))
        paths = unended_paths | dict.fromkeys(index.run_dirs(limit=self.limit))
        entries: dict[Path, tuple[int, JobRecord]] = {}
        records_by_cluster: dict[ClusterKey, list[JobRecord]] = {}
        unreadable_names: set[str] = set()
        for path in paths:
            entry = self._read(path)
            if entry is not None:
                entries[path] = entry
                record = entry[1]
                records_by_cluster.setdefault((record.cluster, record.profile, record.transport), []).append(
                    record
                )
            elif path in unended_paths:  # the queue may contain the job of this run
                unreadable_names.add(index.job_in(path)[0])
        for name in unreadable_names - {key[0] for key in records_by_cluster}:
            with contextlib.suppress(DtslurmError):  # the cluster no longer has a profile
                cluster = self.context.cluster(name)
                records_by_cluster[name, str(cluster.path), cluster.automatic_transport] = []
        self._entries = entries
        return records_by_cluster

    def _read(self, path: Path) -> tuple[int, JobRecord] | None:
        run = RunDir(path)
        try:
            mtime_ns = run.record_path.stat().st_mtime_ns
            entry = self._entries.get(path)
            if entry is not None and entry[0] == mtime_ns:
                return entry
            return mtime_ns, run.load()
        except (OSError, StoreError):
            return None


@dataclass
class ClusterReader:
    """A reader of the rows of one cluster's runs; the last rows stay if the cluster does not answer."""

    context: Context
    name: str
    _last_rows: dict[str, tuple[JobRow, ...]] = field(default_factory=dict)
    _settled: dict[str, tuple[JobRecord, tuple[JobRow, ...]]] = field(default_factory=dict)
    _layouts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    observed_at: float | None = None

    def read(self, records: Sequence[JobRecord]) -> tuple[tuple[JobRow, ...], ClusterLine]:
        """Return the rows of runs and the cluster's reachability; errors of the cluster are not raised."""
        rows: dict[str, tuple[JobRow, ...]] = {}
        unsettled_records = []
        for record in records:
            cached_entry = self._settled.get(record.token)
            if cached_entry is not None and cached_entry[0] == record:
                rows[record.token] = cached_entry[1]
            else:
                unsettled_records.append(record)
        error_text = ""
        try:
            run_views = add_activity(views(self.context, unsettled_records), self.context.clock())
        except (DtslurmError, OSError) as error:
            run_views, error_text = [], str(error)
        for view in run_views:
            error_text = error_text or view.trouble
            rows[view.record.token] = self._make_rows(view)
        if not error_text:
            query_times = [
                view.observed_at for view in run_views if view.observed_at is not None and not view.terminal
            ]
            self.observed_at = max(query_times, default=self.context.clock())
        queued_rows = self._find_queued(run_views)
        for record in unsettled_records:
            rows.setdefault(
                record.token, self._last_rows.get(record.token, (_unknown_row(record, error_text),))
            )
        self._last_rows = rows
        sorted_rows = tuple(row for record in records for row in rows[record.token]) + queued_rows
        return sorted_rows, ClusterLine(name=self.name, observed_at=self.observed_at, trouble=error_text)

    def _find_queued(self, views: Sequence[RunView]) -> tuple[JobRow, ...]:
        """Return the rows of jobs in the queue whose run has no readable record.

        The queue snapshot of the other runs is reused; no further query is made.
        """
        try:
            queued_jobs = find_queued_jobs(self.context, views, self.name, Freshness(background=True))
        except (DtslurmError, OSError):
            return ()
        return tuple(row for view in queued_jobs.views for row in rows_of(view, {}))

    def first(self, records: Sequence[JobRecord]) -> tuple[JobRow, ...]:
        """Return the rows of runs from local records alone, before the first query."""
        rows: list[JobRow] = []
        for record in records:
            if record.final:
                rows += rows_of(RunView(record, record.final), {})
            else:
                rows.append(_unknown_row(record, "asking"))
        return tuple(rows)

    def _make_rows(self, view: RunView) -> tuple[JobRow, ...]:
        record = view.record
        previous = self._last_rows.get(record.token)
        if view.trouble and previous and not previous[0].unknown:
            return previous
        rows = rows_of(view, self._read_layout(record))
        if view.terminal and not view.trouble and record.final == view.statuses:
            end_times = [status.end_time for status in view.statuses]
            now = self.context.clock()
            if all(end is not None and now - end > 900 for end in end_times):
                self._settled[record.token] = record, rows
        return rows

    def _read_layout(self, record: JobRecord) -> Mapping[str, Any]:
        if record.token not in self._layouts:
            try:
                layout = RunDir(Path(record.folder)).document().get("layout")
            except StoreError:
                layout = None
            self._layouts[record.token] = layout if isinstance(layout, dict) else {}
        return self._layouts[record.token]


def _unknown_row(record: JobRecord, error_text: str) -> JobRow:
    return JobRow(
        key=record.token,
        token=record.token,
        job_id=record.job_id or "?",
        name=record.name,
        cluster=record.cluster,
        state=JobState.UNKNOWN.value,
        unknown=True,
        ranks=record.world_size,
        created=record.created_at,
        about=error_text,
        limit=record.time_limit,
        run_dir=record.run_dir,
    )


def rows_of(view: RunView, layout: Mapping[str, Any]) -> tuple[JobRow, ...]:
    """Return a run's row; for an array, its row and a row for each task or group of pending tasks."""
    if view.record.array is None:
        return (_make_row(view, view.statuses[0], layout, None),)
    tasks = tuple(
        _make_row(view, status, layout, status.job_id.rpartition("_")[2] or status.job_id)
        for status in view.statuses
    )
    counts = Counter(status.word for status in view.statuses)
    worst = min(view.statuses, key=_state_priority)
    run_row = _make_row(view, worst, layout, None)
    starts = [row.start for row in tasks if row.start is not None]
    end_times = [row.end for row in tasks if row.end is not None]
    run_row = replace(
        run_row,
        job_id=view.record.job_id or "?",
        activity=None,
        tasks=tuple(counts.most_common()),
        over=view.terminal,
        ok=all(status.ok for status in view.statuses),
        start=min(starts, default=None),
        job_start=None,
        end=max(end_times, default=None) if view.terminal else None,
        about=", ".join(f"{count} {word.lower()}" for word, count in counts.most_common()),
        fix="",
    )
    return (run_row, *tasks)


def add_page(row: JobRow, page: Page | None) -> JobRow:
    """Add the losses, the forecast and the newer of two activities from a job's page to its row."""
    if page is None:
        return row
    row = replace(row, losses=page.losses)
    if row.over:
        return row
    activities = [activity for activity in (page.activity, row.activity) if activity is not None]
    newest_activity = max(activities, key=lambda activity: activity.since + activity.quiet_s, default=None)
    return replace(row, forecast=page.forecast, activity=newest_activity)


def _state_priority(status: JobStatus) -> int:
    """Return the sort key of a task's state; the state with the smallest key represents the array."""
    order = (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN, JobState.FAILED)
    return order.index(status.state) if status.state in order else (9 if status.ok else 5)


def _make_row(view: RunView, status: JobStatus, layout: Mapping[str, Any], task: str | None) -> JobRow:
    record = view.record
    attempt = attempt_number(view.run_of(status), status)
    description, fix, never_starts = _describe(view, status, attempt)
    nodes = status.nodes or whole_number(layout.get("nodes"))
    times = measure_view(view, status)
    gpus = whole_number(layout.get("gpus_per_node"))
    return JobRow(
        key=record.token if task is None else f"{record.token}_{task}",
        token=record.token,
        job_id=status.whole_id or record.job_id or "?",
        name=record.name,
        cluster=record.cluster,
        state=status.word,
        task=task,
        over=status.terminal,
        ok=status.ok,
        unknown=status.unknown,
        pending=status.state is JobState.PENDING,
        nodes=nodes,
        gpus=gpus * nodes if gpus is not None and nodes is not None else None,
        ranks=0 if view.record_problem else record.world_size,
        created=record.created_at,
        start=times.started if times is not None else None,
        end=times.ended if times is not None else None,
        job_start=status.start_time,
        estimated_start=status.estimated_start,
        limit=status.time_limit or record.time_limit,
        time_left=status.time_left,
        reason=status.reason,
        recorded=not view.record_problem,
        about=description,
        fix=fix,
        never=never_starts,
        nodelist=fold_nodes(status.nodelist),
        attempt=attempt,
        parent=PurePosixPath(record.parent).name,
        run_dir=record.run_dir,
        activity=view.activities.get(status.job_id),
        observed_at=status.observed_at,
    )


def _describe(view: RunView, status: JobStatus, attempt: int) -> tuple[str, str, bool]:
    """Describe why a job waits or how it ended, a fix, and whether it will never start."""
    text, fix, never_starts = _describe_state(view, status, attempt)
    if not view.record_problem:
        return text, fix, never_starts
    return "; ".join(filter(None, (text, UNREADABLE))), fix or describe_unrecorded(view), never_starts


def _describe_state(view: RunView, status: JobStatus, attempt: int) -> tuple[str, str, bool]:
    if status.state is JobState.PENDING and status.reason:
        explanation = explain(status.reason, excluded_nodes=status.excluded)
        return (
            explanation.text,
            explanation.fix.replace("JOB", status.job_id),
            explanation.will_start is False,
        )
    if status.unknown:
        return status.reason or "state unknown: no evidence", "", False
    if status.terminal and not status.ok:
        return describe_failure(view.run_of(status), status), "", False
    notes = list_warnings(view.record, view.run_of(status))
    return "; ".join([*notes, *([f"attempt {attempt}"] if attempt else [])]), "", False
