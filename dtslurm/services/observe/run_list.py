"""All runs of this user on all clusters as frozen rows: what the dashboard's job list shows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.node_sets import fold_nodes
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.runs.monitor import Freshness
from dtslurm.services.runs.queued_jobs import UNREADABLE, describe_unrecorded, find_queued_jobs
from dtslurm.services.runs.run_evidence import attempt_number, failure_in_words, marks_of
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.pending import explain
from dtslurm.store.rundir import RunDir
from dtslurm.views.forecast import Forecast
from dtslurm.views.run_page import Page

ClusterKey = tuple[str, str, str]
_CLOCKS_S = 5  # Slurm's clock and the node's differ


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One run, one task of an array, or an array as a whole.

    Attributes:
        key: the run's token, for a task followed by ``_`` and its index.
        task: the array index, None for a run or a whole array.
        state: the word for people: Slurm's base state, or the flag that stands out.
        ranks: how many, 0 where unknown.
        recorded: whether the record of the run can be read; else the row has what the queue knows of its job.
        over, ok: whether it has ended for good, and well.
        limit: the time limit in seconds, as Slurm has it now; else as it was when the run was submitted.
        time_left: seconds until the time limit when the scheduler was asked, None where unknown.
        start, end: of the whole run, see `runs.run_times`; seconds since the epoch, None where
            unknown.
        job_start: when Slurm started the job for the last time, which its time limit counts from.
        estimated_start: seconds since the epoch, None where unknown.
        about: in words why it waits or how it ended; ``fix`` what to do; ``never`` that waiting will not do.
        tasks: of a whole array, how many tasks are in each state.
        attempt: how often its ranks were started before.
        parent: name of the run directory of the run that it repeats or continues; empty if it is the first.
        activity: what the ranks of a running job do, None where that is not known.
        losses: (step, loss) of a running job, empty where no loss is known.
        observed_at: when the scheduler was asked.
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
        """When the time limit ends it, seconds since the epoch; None if it does not run or has no limit."""
        began = self.start if self.job_start is None else self.job_start
        if self.over or self.pending:
            return None
        if self.time_left is not None:
            return self.observed_at + self.time_left
        return began + self.limit if began is not None and self.limit else None

    @property
    def requeued(self) -> bool:
        """Whether Slurm started the job again after the run began, so that its time limit counts anew."""
        if self.job_start is None or self.start is None:
            return False
        return self.job_start > self.start + _CLOCKS_S

    @property
    def stalled(self) -> bool:
        """Whether it runs and none of its ranks does anything."""
        return self.state == JobState.RUNNING.value and self.activity is not None and self.activity.stalled

    @property
    def is_array(self) -> bool:
        """Whether this row stands for all tasks of an array."""
        return bool(self.tasks)


@dataclass(frozen=True, kw_only=True)
class ClusterLine:
    """How a cluster answers: when it last did, and what is wrong now."""

    name: str
    observed_at: float | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Board:
    """The job list at one moment, newest runs first; the tasks of an array follow it."""

    rows: tuple[JobRow, ...] = ()
    clusters: tuple[ClusterLine, ...] = ()
    taken_at: float = 0.0


@dataclass
class Runs:
    """Reads the user's runs; a record that has not changed is not read again."""

    context: Context
    limit: int = 500
    _kept: dict[Path, tuple[int, JobRecord]] = field(default_factory=dict)

    def by_cluster(self) -> dict[ClusterKey, list[JobRecord]]:
        """Return the runs that have not ended, and the newest of the others, for each way to a cluster.

        A cluster whose queue may list jobs of runs without a readable record is there with no run.

        Raises:
            StoreError: the index cannot be read.
        """
        index = self.context.index
        unended = dict.fromkeys(index.run_dirs(limit=None, include_ended=False))
        paths = unended | dict.fromkeys(index.run_dirs(limit=self.limit))
        kept: dict[Path, tuple[int, JobRecord]] = {}
        found: dict[ClusterKey, list[JobRecord]] = {}
        unreadable: set[str] = set()
        for path in paths:
            entry = self._read(path)
            if entry is not None:
                kept[path] = entry
                record = entry[1]
                found.setdefault((record.cluster, record.profile, record.transport), []).append(record)
            elif path in unended:  # the queue may list its job
                unreadable.add(index.job_in(path)[0])
        for name in unreadable - {key[0] for key in found}:
            with contextlib.suppress(DtslurmError):  # its profile is gone
                cluster = self.context.cluster(name)
                found[name, str(cluster.path), cluster.way] = []
        self._kept = kept
        return found

    def _read(self, path: Path) -> tuple[int, JobRecord] | None:
        run = RunDir(path)
        try:
            changed = run.record_path.stat().st_mtime_ns
            before = self._kept.get(path)
            if before is not None and before[0] == changed:
                return before
            return changed, run.load()
        except (OSError, StoreError):
            return None


@dataclass
class ClusterReader:
    """The rows of one cluster's runs. When it does not answer, the last good ones stay."""

    context: Context
    name: str
    _last: dict[str, tuple[JobRow, ...]] = field(default_factory=dict)
    _settled: dict[str, tuple[JobRecord, tuple[JobRow, ...]]] = field(default_factory=dict)
    _layouts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    observed_at: float | None = None

    def read(self, records: Sequence[JobRecord]) -> tuple[tuple[JobRow, ...], ClusterLine]:
        """Return the rows of these runs and how the cluster answered; never raises for a cluster's faults."""
        rows: dict[str, tuple[JobRow, ...]] = {}
        asked = []
        for record in records:
            known = self._settled.get(record.token)
            if known is not None and known[0] == record:
                rows[record.token] = known[1]
            else:
                asked.append(record)
        trouble = ""
        try:
            found = add_activity(views(self.context, asked), self.context.clock())
        except (DtslurmError, OSError) as error:
            found, trouble = [], str(error)
        for view in found:
            trouble = trouble or view.trouble
            rows[view.record.token] = self._rows(view)
        if not trouble:
            asked_at = [one.observed_at for one in found if one.observed_at is not None and not one.terminal]
            self.observed_at = max(asked_at, default=self.context.clock())
        queued = self._find_queued(found)
        for record in asked:
            rows.setdefault(record.token, self._last.get(record.token, (_unseen(record, trouble),)))
        self._last = rows
        ordered = tuple(row for record in records for row in rows[record.token]) + queued
        return ordered, ClusterLine(name=self.name, observed_at=self.observed_at, trouble=trouble)

    def _find_queued(self, found: Sequence[RunView]) -> tuple[JobRow, ...]:
        """Return the rows of jobs in the queue whose run has no record that can be read.

        What was heard of the queue for the other runs serves; the scheduler is asked no more than for those.
        """
        try:
            queued = find_queued_jobs(self.context, found, self.name, Freshness(background=True))
        except (DtslurmError, OSError):
            return ()
        return tuple(row for view in queued.views for row in rows_of(view, {}))

    def first(self, records: Sequence[JobRecord]) -> tuple[JobRow, ...]:
        """Return what is known of runs before anybody was asked."""
        rows: list[JobRow] = []
        for record in records:
            if record.final:
                rows += rows_of(RunView(record, record.final), {})
            else:
                rows.append(_unseen(record, "asking"))
        return tuple(rows)

    def _rows(self, view: RunView) -> tuple[JobRow, ...]:
        record = view.record
        before = self._last.get(record.token)
        if view.trouble and before and not before[0].unknown:
            return before
        made = rows_of(view, self._layout(record))
        if view.terminal and not view.trouble and record.final == view.statuses:
            ended = [status.end_time for status in view.statuses]
            now = self.context.clock()
            if all(end is not None and now - end > 900 for end in ended):
                self._settled[record.token] = record, made
        return made

    def _layout(self, record: JobRecord) -> Mapping[str, Any]:
        if record.token not in self._layouts:
            try:
                layout = RunDir(Path(record.folder)).document().get("layout")
            except StoreError:
                layout = None
            self._layouts[record.token] = layout if isinstance(layout, dict) else {}
        return self._layouts[record.token]


def _unseen(record: JobRecord, trouble: str) -> JobRow:
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
        about=trouble,
        limit=record.time_limit,
        run_dir=record.run_dir,
    )


def rows_of(view: RunView, layout: Mapping[str, Any]) -> tuple[JobRow, ...]:
    """Return a run's row; for an array, the row of the whole and one for each task or group of tasks."""
    if view.record.array is None:
        return (_row(view, view.statuses[0], layout, None),)
    tasks = tuple(
        _row(view, status, layout, status.job_id.rpartition("_")[2] or status.job_id)
        for status in view.statuses
    )
    counts = Counter(status.word for status in view.statuses)
    worst = min(view.statuses, key=_urgency)
    whole = _row(view, worst, layout, None)
    starts = [row.start for row in tasks if row.start is not None]
    ends = [row.end for row in tasks if row.end is not None]
    whole = replace(
        whole,
        job_id=view.record.job_id or "?",
        activity=None,
        tasks=tuple(counts.most_common()),
        over=view.terminal,
        ok=all(status.ok for status in view.statuses),
        start=min(starts, default=None),
        job_start=None,
        end=max(ends, default=None) if view.terminal else None,
        about=", ".join(f"{count} {word.lower()}" for word, count in counts.most_common()),
        fix="",
    )
    return (whole, *tasks)


def with_page(row: JobRow, page: Page | None) -> JobRow:
    """Return a row with what a look at the job's page tells; of two activities the newer counts."""
    if page is None:
        return row
    row = replace(row, losses=page.losses)
    if row.over:
        return row
    activities = [activity for activity in (page.activity, row.activity) if activity is not None]
    newest = max(activities, key=lambda activity: activity.since + activity.quiet_s, default=None)
    return replace(row, forecast=page.forecast, activity=newest)


def _urgency(status: JobStatus) -> int:
    """Return the rank of a task's state among those that an array's one word is chosen from."""
    order = (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN, JobState.FAILED)
    return order.index(status.state) if status.state in order else (9 if status.ok else 5)


def _row(view: RunView, status: JobStatus, layout: Mapping[str, Any], task: str | None) -> JobRow:
    record = view.record
    attempt = attempt_number(view.run_of(status), status)
    about, fix, never = _about(view, status, attempt)
    nodes = status.nodes or _number(layout.get("nodes"))
    times = measure_view(view, status)
    gpus = _number(layout.get("gpus_per_node"))
    return JobRow(
        key=record.token if task is None else f"{record.token}_{task}",
        token=record.token,
        job_id=status.job_id or record.job_id or "?",
        name=record.name,
        cluster=record.cluster,
        state=status.word,
        task=task,
        over=status.terminal,
        ok=status.ok,
        unknown=status.state is JobState.UNKNOWN,
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
        about=about,
        fix=fix,
        never=never,
        nodelist=fold_nodes(status.nodelist),
        attempt=attempt,
        parent=PurePosixPath(record.parent).name,
        run_dir=record.run_dir,
        activity=view.activities.get(status.job_id),
        observed_at=status.observed_at,
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _about(view: RunView, status: JobStatus, attempt: int) -> tuple[str, str, bool]:
    """Return why it waits or how it ended, what to do, and whether waiting is in vain."""
    text, fix, never = _about_state(view, status, attempt)
    if not view.record_problem:
        return text, fix, never
    return "; ".join(filter(None, (text, UNREADABLE))), fix or describe_unrecorded(view), never


def _about_state(view: RunView, status: JobStatus, attempt: int) -> tuple[str, str, bool]:
    if status.state is JobState.PENDING and status.reason:
        said = explain(status.reason, excluded=status.excluded)
        return said.text, said.fix.replace("JOB", status.job_id), said.will_start is False
    if status.state is JobState.UNKNOWN:
        return status.reason or "no evidence of its state", "", False
    if status.terminal and not status.ok:
        return failure_in_words(view.run_of(status), status), "", False
    words = marks_of(view.record, view.run_of(status))
    return "; ".join([*words, *([f"attempt {attempt}"] if attempt else [])]), "", False
