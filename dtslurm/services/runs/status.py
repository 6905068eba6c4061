"""What became of runs: the scheduler's word, else the run's own record, else UNKNOWN. Never a guess."""

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
from dtslurm.model.units import duration
from dtslurm.model.values import dataclass
from dtslurm.services.runs.job_identity import belongs_to_run, describe_reused_id
from dtslurm.services.runs.monitor import Freshness, QueueSnapshot, observe
from dtslurm.services.runs.records import save, settle
from dtslurm.services.runs.run_evidence import (
    apply_events,
    last_word,
    own_evidence,
    places,
    reconcile_with_records,
)
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.rundir import RunDir

STALLED = "STALLED"
_NO_FOLDER = Path(os.devnull) / "none"  # nothing can be below a device
_RETURNS_S = 300.0  # an ended job may come back by requeue; Slurm forgets it after MinJobAge (default 300 s)


@dataclass(frozen=True)
class RunView:
    """One run as it is now.

    Attributes:
        statuses: one observation, or one per array task; never empty.
        trouble: why the scheduler could not be asked, empty if it was; then the observations are old ones.
        observed_at: when the scheduler was really asked, seconds since the epoch; None if it was not.
        activities: what running jobs do, by job id; see `dtslurm.services.observe.activity`.
        record_problem: why the run's record cannot be read, empty if it was read; else the record holds what
            the queue and the index know, and no file of the run is read.
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
        """Return the folder of an array's task, or of the whole run."""
        task = status.job_id.rpartition("_")[2] if self.record.array is not None else ""
        return self.run.task(task) or self.run

    def word_of(self, status: JobStatus) -> str:
        """Return the word for an observation's state: Slurm's, or STALLED for a job that does nothing."""
        activity = self.activities.get(status.job_id)
        return STALLED if activity is not None and activity.stalled else status.word

    def words_of(self, statuses: Sequence[JobStatus]) -> str:
        """Return the word for the state that several observations share; of stalled jobs, for how long."""
        activities = [self.activities.get(status.job_id) for status in statuses]
        longest = max(activities, key=lambda activity: activity.quiet_s if activity is not None else -1.0)
        return describe_state(statuses[0], longest)

    @property
    def time_limit(self) -> int | None:
        """The longest time limit of the tasks that run, in seconds; else the one that the run asked for."""
        known = [status.time_limit for status in self.statuses if status.time_limit is not None]
        return max(known, default=self.record.time_limit)

    @property
    def terminal(self) -> bool:
        """Whether every task is over for good."""
        return all(status.terminal for status in self.statuses)

    @property
    def exit_code(self) -> int:
        """The code ``--wait`` ends with: the highest of the tasks'; 1 for an end without a code."""
        return max((_code(status) for status in self.statuses), default=1)


def describe_state(status: JobStatus, activity: Activity | None) -> str:
    """Return the word for a state; of a stalled job, STALLED and for how long it has done nothing."""
    if activity is None or not activity.stalled:
        return status.word
    return f"{STALLED} {duration(activity.quiet_s)}"


def _code(status: JobStatus) -> int:
    if status.ok:
        return 0
    return status.exit_code or 1


def views(
    context: Context, records: Sequence[JobRecord], *, background: bool = False, after: float = 0.0
) -> list[RunView]:
    """Return the present state of runs; each cluster's scheduler is asked once for all of them, if at all.

    Every process of the user shares what a scheduler said: see `dtslurm.services.runs.monitor`.

    Args:
        background: nobody waits for it, so that older answers do and the scheduler is asked rarely.
        after: seconds since the epoch; something is known to have happened then, and older answers do not do.
    """
    answers: dict[str, RunView] = {}
    by_route: dict[tuple[str, str, str, bool], list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.final and _settled(record.final, context.clock()):
            asked = max(status.observed_at for status in record.final)
            answers[record.token] = RunView(record, record.final, observed_at=asked or None)
        else:
            by_route[record.route].append(record)
    for waiting in by_route.values():
        for view in _ask(context, waiting, Freshness(background, after)):
            answers[view.record.token] = view
    return [answers[record.token] for record in records]


def _settled(final: Sequence[JobStatus], now: float) -> bool:
    return all(status.end_time is not None and now - status.end_time > _RETURNS_S for status in final)


def _ask(context: Context, records: Sequence[JobRecord], need: Freshness) -> list[RunView]:
    heard = QueueSnapshot()
    trouble = ""
    try:
        cluster = context.cluster_of(records[0])
        records = [settle(context, cluster, record) for record in records]
        heard = _heard(context, cluster, records, need)
        trouble = heard.trouble
        _refresh(context, [record for record in records if _has_more_to_say(record, heard)])
    except DtslurmError as error:
        trouble = trouble or error.message
    return [_view(context, record, replace(heard, trouble=trouble)) for record in records]


def _heard(
    context: Context, cluster: ActiveCluster, records: Sequence[JobRecord], need: Freshness
) -> QueueSnapshot:
    """Ask what is known of runs; what they told of themselves since the last answer makes it too old."""
    ids = [record.job_id for record in records if record.job_id]
    if not ids or need.background:
        return observe(context, cluster, ids, need) if ids else QueueSnapshot()
    begin = context.clock()
    heard = observe(context, cluster, ids, _newer(context, records, need))
    far = [record for record in records if record.mirror and not record.final]
    if far and heard.observed_at is not None and heard.observed_at < begin:
        _refresh(context, far)  # nothing was asked of the far side yet
        newer = _newer(context, records, need)
        heard = observe(context, cluster, ids, newer) if newer.after > heard.observed_at else heard
    return heard


def _newer(context: Context, records: Sequence[JobRecord], need: Freshness) -> Freshness:
    words = [_newest_word(record, context.clock()) for record in records]
    return replace(need, after=max([need.after, *words]))


def _newest_word(record: JobRecord, now: float) -> float:
    """Return when the run itself last told of a start or an end, rounded up; 0 if it never did."""
    if record.final:
        return 0.0
    told = [last_word(run) for run in places(record).values()]
    return max((time + 1.0 for _, time in told if time <= now + 2), default=0.0)  # clocks differ


def _refresh(context: Context, records: Sequence[JobRecord]) -> None:
    """Bring the copies of far runs' files up to date, if there are any."""
    if any(record.mirror for record in records):
        from dtslurm.services.runs.sync import refresh

        refresh(context, records)


def _has_more_to_say(record: JobRecord, heard: QueueSnapshot) -> bool:
    """Whether the run's own files may tell news: how it ended, or what nobody else knows.

    They do not once the end is known and the copies hold the script's own word of it, its last.
    """
    seen = heard.jobs.get(record.job_id or "", [])
    if seen and not any(status.state.ended or status.state is JobState.UNKNOWN for status in seen):
        return False
    folders = places(record)
    return not (seen and record.final and all(_told_its_end(folders.get(one.job_id), one) for one in seen))


def _told_its_end(run: RunDir | None, status: JobStatus) -> bool:
    """Whether a copy holds the script's word of just the end that the scheduler tells of."""
    word, time = last_word(run) if run is not None else (None, 0)
    return word is not None and word.get("event") == "ended" and time >= (status.start_time or time + 1)


def _view(context: Context, record: JobRecord, heard: QueueSnapshot) -> RunView:
    seen = heard.jobs.get(record.job_id or "", [])
    told = tuple(reconcile_with_records(record, status) for status in seen if belongs_to_run(record, status))
    statuses = told or record.final or own_evidence(record, context.clock())
    if seen and not told:
        statuses = _if_unknown(statuses, describe_reused_id(record))
    if heard.trouble and record.job_id:
        statuses = _if_unknown(statuses, "the scheduler could not be asked")
    view = RunView(record, statuses, heard.trouble, heard.observed_at)
    if told and view.terminal and _timeless(statuses) != _timeless(record.final):
        view = replace(view, record=_keep_final(context, record, statuses))
        from dtslurm.services.preflight.bad_nodes import learn  # most looks find no end that is new

        learn(context, view.record)
    elif told and not view.terminal:
        view = replace(view, statuses=_since(record, told))
    return view


def _timeless(statuses: Sequence[JobStatus]) -> list[JobStatus]:
    """Return observations without their moments: an end that is seen once more is no news."""
    return [replace(status, observed_at=0.0) for status in statuses]


def _if_unknown(statuses: Sequence[JobStatus], reason: str) -> tuple[JobStatus, ...]:
    unknown = JobState.UNKNOWN
    return tuple(replace(one, reason=reason) if one.state is unknown else one for one in statuses)


def _since(record: JobRecord, told: tuple[JobStatus, ...]) -> tuple[JobStatus, ...]:
    """Return observations with what the run itself told of since: a start, or an end not yet confirmed."""
    folders = places(record)
    return tuple(apply_events(status, folders.get(status.job_id)) for status in told)


def _keep_final(context: Context, record: JobRecord, statuses: tuple[JobStatus, ...]) -> JobRecord:
    """Write the end into the run's record, so that it is known after Slurm has forgotten."""
    ended = replace(record, final=statuses)
    try:
        save(context, ended)
    except (StoreError, OSError):
        return record
    return ended
