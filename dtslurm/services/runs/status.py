"""The state of runs: from the scheduler, else from the run directory, else UNKNOWN; never guessed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.presentation.states import STALLED, describe_state
from dtslurm.services.runs.job_identity import belongs_to_run, describe_reused_id
from dtslurm.services.runs.monitor import Freshness, QueueSnapshot, observe
from dtslurm.services.runs.records import save, settle
from dtslurm.services.runs.run_evidence import (
    apply_events,
    event_folders,
    last_start_or_end,
    reconcile_with_records,
    status_from_run_files,
)
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.left_messages import send_left_messages
from dtslurm.store.rundir import RunDir

_NO_FOLDER = Path(os.devnull) / "none"  # no path below a device exists
_REQUEUE_WINDOW_S = 300.0  # a requeue can revive an ended job until MinJobAge (default 300 s)


@dataclass(frozen=True)
class RunView:
    """The present state of one run.

    Attributes:
        statuses: the status of the job, or one status per array task; never empty.
        trouble: why the scheduler could not be queried, in which case the statuses are old; else empty.
        observed_at: when the scheduler was last queried, in seconds since the epoch; None if it never was.
        activities: the activity of running jobs, by job id; see `dtslurm.services.observe.activity`.
        record_problem: why the run's record cannot be read, else empty. If set, the record is built from the
            queue and the index, and no file of the run is read.
    """

    record: JobRecord
    statuses: tuple[JobStatus, ...]
    trouble: str = ""
    observed_at: float | None = None
    activities: Mapping[str, Activity] = field(default_factory=dict)
    record_problem: str = ""

    @property
    def run(self) -> RunDir:
        """The run's directory."""
        return RunDir(_NO_FOLDER if self.record_problem else Path(self.record.folder))

    def run_of(self, status: JobStatus) -> RunDir:
        """Return the folder of the array task that a status belongs to, else the run directory."""
        task = status.job_id.rpartition("_")[2] if self.record.array is not None else ""
        return self.run.task(task) or self.run

    def word_of(self, status: JobStatus) -> str:
        """Return the name of a status's state: Slurm's name, or STALLED for a job without activity."""
        activity = self.activities.get(status.job_id)
        return STALLED if activity is not None and activity.stalled else status.word

    def words_of(self, statuses: Sequence[JobStatus]) -> str:
        """Return the state that several statuses share; for stalled jobs with the longest stall time."""
        activities = [self.activities.get(status.job_id) for status in statuses]
        longest_activity = max(
            activities, key=lambda activity: activity.quiet_s if activity is not None else -1.0
        )
        return describe_state(statuses[0], longest_activity)

    @property
    def time_limit(self) -> int | None:
        """The longest time limit of the tasks in seconds; the requested limit if Slurm reports none."""
        time_limits = [status.time_limit for status in self.statuses if status.time_limit is not None]
        return max(time_limits, default=self.record.time_limit)

    @property
    def terminal(self) -> bool:
        """Whether every task has finally ended."""
        return all(status.terminal for status in self.statuses)

    @property
    def exit_code(self) -> int:
        """The exit code of ``--wait``: the highest exit code of the tasks; 1 for a failure without a code."""
        return max((_exit_code(status) for status in self.statuses), default=1)


def _exit_code(status: JobStatus) -> int:
    if status.ok:
        return 0
    return status.exit_code or 1


def views(
    context: Context, records: Sequence[JobRecord], *, background: bool = False, newer_than: float = 0.0
) -> list[RunView]:
    """Return the present state of runs, with at most one scheduler query per cluster.

    All processes of the user share the scheduler's answers: see `dtslurm.services.runs.monitor`.

    Args:
        background: no user waits for the answer, so an older cached answer is used and queries are rare.
        newer_than: seconds since the epoch of a known event; cached answers from before then are not used.
    """
    views_by_token: dict[str, RunView] = {}
    by_route: dict[tuple[str, str, str, bool], list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.final and _is_settled(record.final, context.clock()):
            observed_at = max(status.observed_at for status in record.final)
            views_by_token[record.token] = RunView(record, record.final, observed_at=observed_at or None)
        else:
            by_route[record.route].append(record)
    for pending in by_route.values():
        for view in _observe_cluster(context, pending, Freshness(background, newer_than)):
            views_by_token[view.record.token] = view
    run_views = [views_by_token[record.token] for record in records]
    send_left_messages(
        context, [(view.record, view.statuses[0]) for view in run_views if not view.record_problem]
    )
    return run_views


def choose_status(view: RunView, task: str | None) -> JobStatus:
    """Return the status of an array task; by default of the first running task, or of the job."""
    if task is not None:
        for status in view.statuses:
            if status.job_id.rpartition("_")[2] == task:
                return status
    running_statuses = [status for status in view.statuses if status.state is JobState.RUNNING]
    return (running_statuses or list(view.statuses))[0]


def _is_settled(statuses: Sequence[JobStatus], now: float) -> bool:
    return all(
        status.end_time is not None and now - status.end_time > _REQUEUE_WINDOW_S for status in statuses
    )


def _observe_cluster(context: Context, records: Sequence[JobRecord], freshness: Freshness) -> list[RunView]:
    snapshot = QueueSnapshot()
    error_text = ""
    try:
        cluster = context.cluster_of(records[0])
        records = [settle(context, cluster, record) for record in records]
        snapshot = _observe_queue(context, cluster, records, freshness)
        error_text = snapshot.trouble
        _refresh(context, [record for record in records if _may_have_news(record, snapshot)])
    except DtslurmError as error:
        error_text = error_text or error.message
    return [_view(context, record, replace(snapshot, trouble=error_text)) for record in records]


def _observe_queue(
    context: Context, cluster: ActiveCluster, records: Sequence[JobRecord], freshness: Freshness
) -> QueueSnapshot:
    """Return a queue snapshot of runs that is newer than the last event in their run directories."""
    ids = [record.job_id for record in records if record.job_id]
    if not ids or freshness.background:
        return observe(context, cluster, ids, freshness) if ids else QueueSnapshot()
    started_at = context.clock()
    snapshot = observe(context, cluster, ids, _require_newer_than_events(context, records, freshness))
    remote_records = [record for record in records if record.mirror and not record.final]
    if remote_records and snapshot.observed_at is not None and snapshot.observed_at < started_at:
        _refresh(context, remote_records)  # the local copies of remote files are older than this call
        fresher = _require_newer_than_events(context, records, freshness)
        snapshot = (
            observe(context, cluster, ids, fresher) if fresher.after > snapshot.observed_at else snapshot
        )
    return snapshot


def _require_newer_than_events(
    context: Context, records: Sequence[JobRecord], freshness: Freshness
) -> Freshness:
    event_times = [_newest_event_time(record, context.clock()) for record in records]
    return replace(freshness, after=max([freshness.after, *event_times]))


def _newest_event_time(record: JobRecord, now: float) -> float:
    """Return the time of the last start or end event of a run, rounded up; 0 if there is none."""
    if record.final:
        return 0.0
    events = [last_start_or_end(run) for run in event_folders(record).values()]
    return max((time + 1.0 for _, time in events if time <= now + 2), default=0.0)  # clocks may differ by 2 s


def _refresh(context: Context, records: Sequence[JobRecord]) -> None:
    """Update the local copies of remote runs' files, if there are any."""
    if any(record.mirror for record in records):
        from dtslurm.services.runs.sync import refresh

        refresh(context, records)


def _may_have_news(record: JobRecord, snapshot: QueueSnapshot) -> bool:
    """Return whether the run's files may hold news: how the run ended, or facts that Slurm does not know.

    They hold none once the end is known and the copies contain the script's ``ended`` event, its last event.
    """
    statuses = snapshot.jobs.get(record.job_id or "", [])
    if statuses and not any(status.state.ended or status.state is JobState.UNKNOWN for status in statuses):
        return False
    folders = event_folders(record)
    return not (
        statuses
        and record.final
        and all(_has_end_event(folders.get(status.job_id), status) for status in statuses)
    )


def _has_end_event(run: RunDir | None, status: JobStatus) -> bool:
    """Return whether a copy contains the ``ended`` event of the end that the scheduler reports."""
    event, time = last_start_or_end(run) if run is not None else (None, 0)
    return event is not None and event.get("event") == "ended" and time >= (status.start_time or time + 1)


def _view(context: Context, record: JobRecord, snapshot: QueueSnapshot) -> RunView:
    listed_statuses = snapshot.jobs.get(record.job_id or "", [])
    reconciled = tuple(
        reconcile_with_records(record, status) for status in listed_statuses if belongs_to_run(record, status)
    )
    statuses = reconciled or record.final or status_from_run_files(record, context.clock())
    if listed_statuses and not reconciled:
        statuses = _explain_unknown(statuses, describe_reused_id(record))
    if snapshot.trouble and record.job_id:
        statuses = _explain_unknown(statuses, "the scheduler could not be queried")
    view = RunView(record, statuses, snapshot.trouble, snapshot.observed_at)
    if reconciled and view.terminal and _without_times(statuses) != _without_times(record.final):
        view = replace(view, record=_save_final(context, record, statuses))
        from dtslurm.services.preflight.bad_nodes import (
            store_run_notes,
        )  # imported late: most calls find no new end

        store_run_notes(context, view.record)
    elif reconciled and not view.terminal:
        view = replace(view, statuses=_apply_newer_events(record, reconciled))
    return view


def _without_times(statuses: Sequence[JobStatus]) -> list[JobStatus]:
    """Return statuses without ``observed_at``, so that an end observed twice compares as equal."""
    return [replace(status, observed_at=0.0) for status in statuses]


def _explain_unknown(statuses: Sequence[JobStatus], reason: str) -> tuple[JobStatus, ...]:
    unknown = JobState.UNKNOWN
    return tuple(replace(status, reason=reason) if status.state is unknown else status for status in statuses)


def _apply_newer_events(record: JobRecord, statuses: tuple[JobStatus, ...]) -> tuple[JobStatus, ...]:
    """Return statuses updated from newer events in the run directory: a start, or an unconfirmed end."""
    folders = event_folders(record)
    return tuple(apply_events(status, folders.get(status.job_id)) for status in statuses)


def _save_final(context: Context, record: JobRecord, statuses: tuple[JobStatus, ...]) -> JobRecord:
    """Write the final statuses to the run's record, because Slurm purges ended jobs."""
    final_record = replace(record, final=statuses)
    try:
        save(context, final_record)
    except (StoreError, OSError):
        return record
    return final_record
