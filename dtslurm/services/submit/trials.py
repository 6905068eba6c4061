"""The trials of a sweep: read their states and results, resume failed trials, stop the sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any

from dtslurm.errors import JobNotFound, RequestInvalid, StoreError, SubmitInterrupted
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.sweep import MEMBERS, SETTINGS, TRIALS
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.remote.answers import interpret
from dtslurm.services.observe.telemetry import log_patterns
from dtslurm.services.runs import control
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.submit.resubmit import restore_request
from dtslurm.services.submit.submit import Progress
from dtslurm.services.submit.sweep import Trial, arrays, save_members, submit_sweep
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import find_worker_host, query_worker
from dtslurm.slurm.arrays import task_ranges
from dtslurm.store.lock import try_lock
from dtslurm.store.rundir import RunDir, json_lines
from dtslurm.views.telemetry import first_failure_of

_TIMEOUT_S = 300.0
_WORKER_MODULES = ("lib.rank_files", "telemetry.failure", "telemetry.lines", "telemetry.log_metrics")
_RESUME_LOCK = "resuming.lock"
_ENDED_BY_SLURM = {JobState.TIMEOUT, JobState.CANCELLED, JobState.OUT_OF_MEMORY}
WAITING, RUNNING, DONE, STOPPED, FAILED, NEVER = (
    "waiting",
    "running",
    "done",
    "stopped",
    "failed",
    "never ran",
)


@dataclass(frozen=True)
class TrialView:
    """The current state of a trial.

    Attributes:
        state: ``waiting``, ``running``, ``done``, ``stopped`` (early), ``failed`` or ``never ran``.
        job: the array task that runs the trial or ran it last, such as ``17_3``.
        step, last, best: last step, last value and best value of the metric, None if none was written.
        folder: the trial's folder on the cluster.
        cause: the cause of a failure, empty for a trial that did not fail.
        points: (step, value) pairs of the metric, if they were requested.
        args: further arguments of the training script.
    """

    number: int
    name: str
    values: Mapping[str, str]
    state: str
    job: str = ""
    step: float | None = None
    last: float | None = None
    best: float | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    folder: str = ""
    cause: str = ""
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    args: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class SweepView:
    """The current state of a sweep.

    Attributes:
        head: the first run of the sweep.
        runs: all runs of the sweep, with the runs that resumed it last.
        metric, mode: the metric by which trials are compared, and ``min`` or ``max``.
        written: names of the metrics that trials have written, if no trial has written ``metric``.
    """

    head: JobRecord
    runs: tuple[JobRecord, ...]
    trials: tuple[TrialView, ...]
    metric: str
    mode: str
    trouble: str = ""
    written: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def ranked(self) -> list[TrialView]:
        """Return the trials, best value first; then failed trials, and last the trials without a value."""
        sign = -1 if self.mode == "max" else 1
        return sorted(
            self.trials,
            key=lambda trial: (
                trial.best is None,
                trial.best is not None and trial.state == FAILED,
                0.0 if trial.best is None else sign * trial.best,
                trial.number,
            ),
        )

    def counts(self) -> dict[str, int]:
        """Return the number of trials in each state."""
        states = [trial.state for trial in self.trials]
        order = (DONE, STOPPED, RUNNING, WAITING, FAILED, NEVER)
        return {state: states.count(state) for state in order if state in states}


def load_sweep(
    context: Context,
    selector: str,
    cluster: str | None = None,
    *,
    points: int = 0,
    metric: tuple[str, str] | None = None,
) -> SweepView:
    """Read the sweep that a run belongs to, with at most ``points`` points of each trial's metric.

    Args:
        metric: a metric, and ``min`` or ``max``, instead of those that the sweep compares its trials by.

    Raises:
        JobNotFound: no run matches ``selector``.
        RequestInvalid: the run belongs to no sweep.
        TransportError: the trials' files could not be read on the cluster.
        ProfileInvalid: a file of log patterns is invalid.
    """
    head, runs = _load_members(context, find(context, selector, cluster))
    settings = json.loads((Path(head.folder) / SETTINGS).read_bytes())
    if metric is not None:
        settings |= {"metric": metric[0], "mode": metric[1]}
    run_views = views(context, runs)
    host = find_worker_host(context, head)
    request = {
        "runs": [record.run_dir for record in runs],
        "per_task": settings["per_task"],
        "metric": settings["metric"],
        "mode": settings["mode"],
        "patterns": log_patterns(context),
        "points": points,
    }
    answer = query_worker(host, "trial_report", request, timeout=_TIMEOUT_S, parts=_WORKER_MODULES)
    trials, keys = interpret(
        answer,
        lambda answer: _build_trials(run_views, answer["runs"], settings["per_task"]),
        "trial_report.py",
    )
    has_metric = any(trial.best is not None for trial in trials.values())
    return SweepView(
        head=head,
        runs=tuple(view.record for view in run_views),
        trials=tuple(trials[number] for number in sorted(trials)),
        metric=settings["metric"],
        mode=settings["mode"],
        trouble="; ".join(dict.fromkeys(view.trouble for view in run_views if view.trouble)),
        written=() if has_metric else tuple(keys),
        settings=settings,
    )


def _build_trials(
    views: Sequence[RunView], records_by_view: Sequence[Sequence[Mapping[str, Any]]], per_task: int
) -> tuple[dict[int, TrialView], list[str]]:
    """Return the trials by number, and the names of the metrics that the trials have written."""
    trials: dict[int, TrialView] = {}
    for view, records in zip(views, records_by_view, strict=True):
        trials |= {trial.number: trial for trial in _build_run_trials(view, records, per_task)}
    keys = dict.fromkeys(
        str(key) for records in records_by_view for record in records for key in record.get("keys") or ()
    )
    return trials, list(keys)


def _load_members(context: Context, record: JobRecord) -> tuple[JobRecord, list[JobRecord]]:
    """Return the first run of a sweep, and all runs of the sweep in the order of submission."""
    if not record.sweep:
        raise RequestInvalid([f"job {record.job_id or record.name} is not a sweep; dtslurm status shows it"])
    head = (
        record if record.run_dir == record.sweep else find(context, Path(record.sweep).name, record.cluster)
    )
    path = Path(head.folder) / MEMBERS
    try:
        folders = json.loads(path.read_bytes())["runs"]
    except (OSError, ValueError, KeyError):
        folders = [head.folder]  # the submission was interrupted
    records = []
    for folder in folders:
        try:
            records.append(RunDir(Path(folder)).load())
        except StoreError:
            raise JobNotFound(f"{folder}, a run directory of this sweep, no longer exists") from None
    return head, records


def _build_run_trials(view: RunView, records: Sequence[Mapping[str, Any]], per_task: int) -> list[TrialView]:
    task_states = _task_states(view)
    records_by_index = {record["index"]: record for record in records}
    trials = []
    for index, line in enumerate(json_lines(Path(view.record.folder) / TRIALS)):
        task = index // per_task
        record = records_by_index.get(index, {})
        measurements = {
            key: record.get(key) for key in ("step", "last", "best", "exit_code", "started", "ended")
        }
        state = _trial_state(record, task_states.get(task))
        trials.append(
            TrialView(
                number=line["number"],
                name=line["name"],
                values=record.get("values") or line["values"],
                state=state,
                cause=_failure_cause(record, task_states.get(task)) if state == FAILED else "",
                points=tuple((float(step), float(value)) for step, value in record.get("points") or ()),
                job=f"{view.record.job_id}_{task}",
                folder=record.get("folder") or "",
                args=tuple(line.get("args") or ()),
                **measurements,
            )
        )
    return trials


def _trial_state(item: Mapping[str, Any], status: JobStatus | None) -> str:
    """Return a trial's state: from the end that the trial recorded, otherwise from Slurm's array task state.

    After a requeue, Slurm's state is used first, because the recorded end is from an earlier attempt.
    """
    if status is not None and _was_requeued(item, status):
        return WAITING if status.state is JobState.PENDING else RUNNING
    if item.get("stopped") is not None:
        return STOPPED
    if item.get("exit_code") is not None:
        return DONE if item["exit_code"] == 0 else FAILED
    has_ended = status is not None and status.state.ended
    if item:
        return FAILED if has_ended else RUNNING
    return NEVER if has_ended else WAITING


def _failure_cause(item: Mapping[str, Any], status: JobStatus | None) -> str:
    """Return a trial's cause of failure: its first failure, otherwise Slurm's state of its array task."""
    if status is not None and status.state in _ENDED_BY_SLURM:
        return status.word
    failure = first_failure_of(item.get("failure"))
    if failure is not None and failure.error:
        location = f", {PurePosixPath(failure.file).name}:{failure.line}" if failure.file else ""
        return f"{failure.error} (rank {failure.rank}{location})"
    if failure is not None:
        return f"exit code {failure.exit_code} (rank {failure.rank})"
    if item.get("exit_code") is not None:
        return f"exit code {item['exit_code']}"
    return status.word if status is not None else ""


def _was_requeued(item: Mapping[str, Any], status: JobStatus) -> bool:
    """Return whether the array task is pending, or has started, after the last record of the trial."""
    start, end = item.get("started"), item.get("ended")
    if status.state is JobState.PENDING:
        return max(start or 0, end or 0) <= status.observed_at
    return status.state is JobState.RUNNING and end is not None and end < (status.start_time or 0)


def _task_states(view: RunView) -> dict[int, JobStatus]:
    states: dict[int, JobStatus] = {}
    for status in view.statuses:
        task = status.job_id.partition("_")[2]
        if task.isdecimal():
            states[int(task)] = status
        elif task.startswith("["):
            ranges = task_ranges(task)
            states |= {index: status for task_range in ranges for index in task_range}
    if view.terminal:  # tasks that Slurm no longer lists
        state = JobState.CANCELLED if view.record.job_id else JobState.UNKNOWN
        default_status = JobStatus(job_id=view.record.job_id or "", state=state)
        count = sum(1 for _ in json_lines(Path(view.record.folder) / TRIALS))
        states = {**dict.fromkeys(range(count), default_status), **states}
    return states


def resume(
    context: Context,
    selector: str,
    cluster: str | None = None,
    progress: Progress = lambda *_: None,
    records: list[JobRecord] | None = None,
) -> list[JobRecord]:
    """Queue the failed and never started trials of a sweep again; each resumes from its own checkpoints.

    Args:
        records: a list to which each new run is added as soon as it is queued.

    Returns:
        The new runs; an empty list if no trial has to run again.

    Raises:
        RequestInvalid: some trials have not ended, the original request is no longer valid, or another
            process is resuming the sweep.
    """
    head, _ = _load_members(context, find(context, selector, cluster))
    # Hold the lock from reading the trials until the new runs are saved; otherwise two processes could queue
    # the same trials. The lock file is beside the list of runs in the local folder of the sweep, so it covers
    # all processes that share that folder, but not another machine with its own copy.
    with try_lock(Path(head.folder) / _RESUME_LOCK) as has_lock:
        if not has_lock:
            raise RequestInvalid(
                [f"{selector}: another dtslurm process is resuming this sweep; no job was queued"],
                hint=f"dtslurm sweep status {selector} shows the new jobs when that process has ended",
            )
        return _resume(context, selector, cluster, progress, [] if records is None else records)


def _resume(
    context: Context, selector: str, cluster: str | None, progress: Progress, records: list[JobRecord]
) -> list[JobRecord]:
    sweep = load_sweep(context, selector, cluster)
    waiting = [trial for trial in sweep.trials if trial.state in {WAITING, RUNNING}]
    if waiting:
        raise RequestInvalid(
            [f"{selector}: {pluralize(len(waiting), 'trial')} pending or running"],
            hint=f"dtslurm sweep status {selector} shows them; dtslurm sweep stop {selector} ends them",
        )
    unfinished = [trial for trial in sweep.trials if trial.state in {FAILED, NEVER}]
    if not unfinished:
        return []
    trials = [
        Trial(trial.number, trial.name, trial.values, _checkpoint_folder(trial), trial.args)
        for trial in unfinished
    ]
    run_context, request = restore_request(sweep.head)
    sweeping = arrays(run_context, request, sweep.settings, iter(trials))
    try:
        submit_sweep(run_context, sweeping, "", records, progress)
    except SubmitInterrupted as interrupt:
        if interrupt.record is not None:
            records.append(interrupt.record)
        raise
    finally:  # the runs that were queued belong to this sweep
        save_members(context, sweep.head, [*sweep.runs, *records])
    return records


def _checkpoint_folder(trial: TrialView) -> str:
    return f"{trial.folder}/checkpoints" if trial.folder else ""


def stop(context: Context, selector: str, cluster: str | None = None) -> list[str]:
    """Cancel the running and pending jobs of a sweep; return the job ids."""
    head, runs = _load_members(context, find(context, selector, cluster))
    active_records = [
        view.record for view in views(context, runs) if not view.terminal and view.record.job_id
    ]
    tokens = [record.token for record in active_records]
    return control.change_jobs(context, "cancel", tokens, head.cluster).done if tokens else []
