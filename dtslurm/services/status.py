"""What became of runs: the scheduler's word, else the run's own record, else UNKNOWN. Never a guess."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtslurm.errors import DtslurmError, JobNotFound, RequestInvalid, StoreError
from dtslurm.model.job import JobRecord
from dtslurm.model.state import JobState, JobStatus
from dtslurm.services.check import array_indices
from dtslurm.services.context import Context
from dtslurm.services.mirror import refresh
from dtslurm.services.records import save, settle
from dtslurm.store.rundir import RunDir

_RETURNS_S = 300.0  # an ended job may come back by requeue; Slurm forgets it after MinJobAge (default 300 s)


@dataclass(frozen=True)
class RunView:
    """One run as it is now.

    Attributes:
        statuses: one observation, or one per array task; never empty.
        trouble: why the scheduler could not be asked, empty if it was.
    """

    record: JobRecord
    statuses: tuple[JobStatus, ...]
    trouble: str = ""

    @property
    def run(self) -> RunDir:
        """The run's directory."""
        return RunDir(Path(self.record.folder))

    @property
    def terminal(self) -> bool:
        """Whether every task is over for good."""
        return all(status.terminal for status in self.statuses)

    @property
    def exit_code(self) -> int:
        """The code ``--wait`` ends with: the highest of the tasks'; 1 for an end without a code."""
        return max((_code(status) for status in self.statuses), default=1)


def _code(status: JobStatus) -> int:
    if status.ok:
        return 0
    return status.exit_code or 1


def views(context: Context, records: Sequence[JobRecord]) -> list[RunView]:
    """Return the present state of runs; each cluster's scheduler is asked once for all of them."""
    answers: dict[str, RunView] = {}
    by_cluster: dict[tuple[str, str, str], list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.final and _settled(record.final, context.clock()):
            answers[record.token] = RunView(record, record.final)
        else:
            by_cluster[record.cluster, record.profile, record.transport].append(record)
    for waiting in by_cluster.values():
        for view in _ask(context, waiting):
            answers[view.record.token] = view
    return [answers[record.token] for record in records]


def _settled(final: Sequence[JobStatus], now: float) -> bool:
    return all(status.end_time is not None and now - status.end_time > _RETURNS_S for status in final)


def _ask(context: Context, records: Sequence[JobRecord]) -> list[RunView]:
    trouble = ""
    found: Mapping[str, list[JobStatus]] = {}
    try:
        cluster = context.cluster_of(records[0])
        records = [settle(context, cluster, record) for record in records]
        ids = [record.job_id for record in records if record.job_id]
        found = cluster.scheduler.query(ids) if ids else {}
        refresh(context, [record for record in records if _may_be_over(found.get(record.job_id or "", []))])
    except DtslurmError as error:
        trouble = error.message
    return [_view(context, record, found.get(record.job_id or "", []), trouble) for record in records]


def _may_be_over(seen: Sequence[JobStatus]) -> bool:
    """Whether the run's own files have something to say: how it ended, or what nobody else knows."""
    return not seen or any(status.state.ended or status.state is JobState.UNKNOWN for status in seen)


def _view(context: Context, record: JobRecord, seen: Sequence[JobStatus], trouble: str) -> RunView:
    told = tuple(_with_true_code(record, status) for status in seen if _is_of(record, status))
    statuses = told or record.final or own_evidence(record, context.clock())
    if seen and not told:
        reason = (
            f"job {record.job_id} is another one now: the controller lost this run's and reused its number"
        )
        statuses = tuple(
            replace(status, reason=reason) if status.state is JobState.UNKNOWN else status
            for status in statuses
        )
    if trouble and record.job_id:
        statuses = tuple(
            replace(status, reason="the scheduler could not be asked")
            if status.state is JobState.UNKNOWN
            else status
            for status in statuses
        )
    view = RunView(record, statuses, trouble)
    if told and view.terminal and statuses != record.final:
        view = replace(view, record=_keep_final(context, record, statuses))
    return view


def _is_of(record: JobRecord, status: JobStatus) -> bool:
    """Whether an observation is of this run's job: a restarted controller gives its number to another.

    squeue always shows a job's comment; accounting does so where the site keeps it.
    """
    marks = re.findall(r"dtslurm:[0-9a-f]+(?::[0-9a-f]+)?", status.comment)
    if marks or status.source == "squeue":
        return record.comment in marks or (not marks and status.name in {"", record.name})
    return True


def _keep_final(context: Context, record: JobRecord, statuses: tuple[JobStatus, ...]) -> JobRecord:
    """Write the end into the run's record, so that it is known after Slurm has forgotten."""
    ended = replace(record, final=statuses)
    try:
        save(context, ended)
    except (StoreError, OSError):
        return record
    return ended


def own_evidence(record: JobRecord, now: float) -> tuple[JobStatus, ...]:
    """Return what the run's own files tell when the scheduler tells nothing: one status, or one per task.

    Only an ``ended`` event written by the script itself, newer than any ``started``, is an end.
    """
    if record.phase == "withdrawn":
        reason = "sbatch's answer was lost and no job came of it; submitting again is safe"
        never = JobStatus(job_id="", state=JobState.CANCELLED, reason=reason, name=record.name)
        return (replace(never, source="record", observed_at=now),)
    if record.job_id is None:
        reason = "sbatch's answer was lost; no job with this token is known to the scheduler"
        unknown = JobStatus(job_id="", state=JobState.UNKNOWN, reason=reason, name=record.name)
        return (replace(unknown, observed_at=now),)
    run = RunDir(Path(record.folder))
    if record.array is None:
        return (_own_status(run, record, record.job_id, now),)
    tasks = run.tasks()
    told = tuple(_own_status(place, record, f"{record.job_id}_{task}", now) for task, place in tasks.items())
    if len(tasks) < len(array_indices(record.array)):
        rest = _own_status(run, record, f"{record.job_id}_[]", now)
        told = (*told, replace(rest, reason=f"no trace of the other tasks of {record.array}"))
    return told


def _own_status(run: RunDir, record: JobRecord, job_id: str, now: float) -> JobStatus:
    base = JobStatus(
        job_id=job_id,
        state=JobState.UNKNOWN,
        name=record.name,
        reason="the scheduler does not know this job (any more), and it left no record of its end",
        observed_at=now,
    )
    end = _own_end(run)
    if end is None:
        return base
    code, time = end
    state = JobState.COMPLETED if code == 0 else JobState.FAILED
    return replace(base, state=state, exit_code=code, reason="", end_time=time, source="record")


def _own_end(run: RunDir) -> tuple[int, int | None] | None:
    """Return (exit code, time) of the script's own last word, None if it has started since or said none."""
    told = [event for event in run.events() if event.get("event") in {"started", "ended"}]
    if not told or told[-1]["event"] != "ended" or not isinstance(told[-1].get("exit_code"), int):
        return None
    time = told[-1].get("time")
    return told[-1]["exit_code"], time if isinstance(time, int) else None


def _with_true_code(record: JobRecord, status: JobStatus) -> JobStatus:
    """Return a failed status with the script's own exit code: sacct of 22.05 turns 137 into 9."""
    if status.state is not JobState.FAILED or not status.exit_code:
        return status
    run = RunDir(Path(record.folder))
    if record.array is not None:
        run = run.tasks().get(status.job_id.rpartition("_")[2], run)
    end = _own_end(run)
    return replace(status, exit_code=end[0]) if end and end[0] else status


def find(context: Context, selector: str, cluster: str | None = None) -> JobRecord:
    """Return the one run that ``selector`` names: a job id, array task, token, run name or run directory.

    Raises:
        JobNotFound: none matches.
        RequestInvalid: runs on several clusters match.
    """
    path = Path(selector).expanduser()
    if "/" in selector and (path / "job.json").is_file():
        return RunDir(path).load()
    runs = _existing(
        context.index.find(selector, cluster) or context.index.find(selector.split("_", 1)[0], cluster)
    )
    if not runs:
        raise JobNotFound(
            f"no run {selector!r} is known here",
            hint="dtslurm status lists the known runs; a run directory's path works too",
        )
    clusters = sorted({record.cluster for record in runs})
    if len(clusters) > 1:
        raise RequestInvalid(
            [f"{selector} is a job on several clusters: {', '.join(clusters)}"], hint="say which by --cluster"
        )
    return runs[0]


def recent(context: Context, limit: int, cluster: str | None = None) -> list[JobRecord]:
    """Return the newest runs, newest first."""
    records = _existing(context.index.run_dirs(limit=limit))
    return [record for record in records if cluster is None or record.cluster == cluster]


def _existing(paths: Sequence[Path]) -> list[JobRecord]:
    """Return the records of run directories that are still there."""
    records = []
    for path in paths:
        try:
            records.append(RunDir(path).load())
        except StoreError:
            continue
    return records
