"""How the trials of a sweep fare, and what is done about them: results, resuming, stopping."""

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
from dtslurm.model.units import pluralize
from dtslurm.model.values import dataclass
from dtslurm.remote.answers import interpret
from dtslurm.services.observe.telemetry import log_patterns
from dtslurm.services.runs import control
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.submit.resubmit import asked_for
from dtslurm.services.submit.submit import Progress
from dtslurm.services.submit.sweep import Trial, arrays, save_members, submit_sweep
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import ask, far_side
from dtslurm.slurm.arrays import task_ranges
from dtslurm.store.lock import try_lock
from dtslurm.store.rundir import RunDir, json_lines
from dtslurm.views.telemetry import first_failure_of

_LIMIT_S = 300.0
_PARTS = ("telemetry.failure", "telemetry.lines", "telemetry.log_metrics")
_RESUMING = "resuming.lock"
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
    """A trial as it is now.

    Attributes:
        state: ``waiting``, ``running``, ``done``, ``stopped`` (early), ``failed`` or ``never ran``.
        job: the array task that runs it or ran it last, such as ``17_3``.
        step, last, best: of its metric, None where none was written.
        folder: its files, on the cluster.
        cause: why it failed, empty for a trial that did not.
        points: (step, value) of its metric, where they were wanted.
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


@dataclass(frozen=True)
class SweepView:
    """A sweep as it is now.

    Attributes:
        head: its first run.
        runs: all of its runs, those that resumed it last.
        metric, mode: what trials are compared by.
        written: what trials write, where none has written the metric.
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
        """Return the trials, the best first; then those that failed, and those without a result last."""
        sign = -1 if self.mode == "max" else 1
        return sorted(
            self.trials,
            key=lambda one: (
                one.best is None,
                one.best is not None and one.state == FAILED,
                0.0 if one.best is None else sign * one.best,
                one.number,
            ),
        )

    def counts(self) -> dict[str, int]:
        """Return how many trials are in each state."""
        states = [trial.state for trial in self.trials]
        order = (DONE, STOPPED, RUNNING, WAITING, FAILED, NEVER)
        return {state: states.count(state) for state in order if state in states}


def look(context: Context, selector: str, cluster: str | None = None, *, points: int = 0) -> SweepView:
    """Return the sweep that a run belongs to, with at most so many points of each trial's metric.

    Raises:
        JobNotFound: there is no such run.
        RequestInvalid: it belongs to no sweep.
        TransportError: the trials' files could not be read where they are.
        ProfileInvalid: a file of patterns for log lines is wrong.
    """
    head, runs = _members(context, find(context, selector, cluster))
    settings = json.loads((Path(head.folder) / SETTINGS).read_bytes())
    seen = views(context, runs)
    transport, python = far_side(context, head)
    request = {
        "runs": [record.run_dir for record in runs],
        "per_task": settings["per_task"],
        "metric": settings["metric"],
        "mode": settings["mode"],
        "patterns": log_patterns(context),
        "points": points,
    }
    answer = ask(transport, python, "trial_report", request, timeout=_LIMIT_S, parts=_PARTS)
    trials, keys = interpret(
        answer, lambda answer: _trials(seen, answer["runs"], settings["per_task"]), "trial_report.py"
    )
    compared = any(trial.best is not None for trial in trials.values())
    return SweepView(
        head=head,
        runs=tuple(view.record for view in seen),
        trials=tuple(trials[number] for number in sorted(trials)),
        metric=settings["metric"],
        mode=settings["mode"],
        trouble="; ".join(dict.fromkeys(view.trouble for view in seen if view.trouble)),
        written=() if compared else tuple(keys),
        settings=settings,
    )


def _trials(
    views: Sequence[RunView], told: Sequence[Sequence[Mapping[str, Any]]], per_task: int
) -> tuple[dict[int, TrialView], list[str]]:
    """Return the trials by number, and the names of the metrics that they wrote."""
    trials: dict[int, TrialView] = {}
    for view, found in zip(views, told, strict=True):
        trials |= {trial.number: trial for trial in _of_run(view, found, per_task)}
    keys = dict.fromkeys(str(key) for found in told for item in found for key in item.get("keys") or ())
    return trials, list(keys)


def _members(context: Context, record: JobRecord) -> tuple[JobRecord, list[JobRecord]]:
    """Return a sweep's first run and all of them, in the order in which they were queued."""
    if not record.sweep:
        raise RequestInvalid([f"job {record.job_id or record.name} is no sweep; dtslurm status shows it"])
    head = (
        record if record.run_dir == record.sweep else find(context, Path(record.sweep).name, record.cluster)
    )
    path = Path(head.folder) / MEMBERS
    try:
        folders = json.loads(path.read_bytes())["runs"]
    except (OSError, ValueError, KeyError):
        folders = [head.folder]  # it was cut off while it was queued
    records = []
    for folder in folders:
        try:
            records.append(RunDir(Path(folder)).load())
        except StoreError:
            raise JobNotFound(f"{folder}, a run of this sweep, is gone") from None
    return head, records


def _of_run(view: RunView, told: Sequence[Mapping[str, Any]], per_task: int) -> list[TrialView]:
    states = _task_states(view)
    seen = {item["index"]: item for item in told}
    found = []
    for index, line in enumerate(json_lines(Path(view.record.folder) / TRIALS)):
        task = index // per_task
        item = seen.get(index, {})
        known = {key: item.get(key) for key in ("step", "last", "best", "exit_code", "started", "ended")}
        state = _state(item, states.get(task))
        found.append(
            TrialView(
                number=line["number"],
                name=line["name"],
                values=item.get("values") or line["values"],
                state=state,
                cause=_cause(item, states.get(task)) if state == FAILED else "",
                points=tuple((float(step), float(value)) for step, value in item.get("points") or ()),
                job=f"{view.record.job_id}_{task}",
                folder=item.get("folder") or "",
                **known,
            )
        )
    return found


def _state(item: Mapping[str, Any], status: JobStatus | None) -> str:
    """Return a trial's state: its own word of its end first, then what Slurm says of its array task.

    What Slurm says counts first where the trial's own word is of an attempt before it: after a requeue.
    """
    if status is not None and _queued_since(item, status):
        return WAITING if status.state is JobState.PENDING else RUNNING
    if item.get("stopped") is not None:
        return STOPPED
    if item.get("exit_code") is not None:
        return DONE if item["exit_code"] == 0 else FAILED
    over = status is not None and status.state.ended
    if item:
        return FAILED if over else RUNNING
    return NEVER if over else WAITING


def _cause(item: Mapping[str, Any], status: JobStatus | None) -> str:
    """Return why a trial failed: its first failure, or else what Slurm says of its array task."""
    if status is not None and status.state in _ENDED_BY_SLURM:
        return status.word
    failure = first_failure_of(item.get("failure"))
    if failure is not None and failure.error:
        place = f", {PurePosixPath(failure.file).name}:{failure.line}" if failure.file else ""
        return f"{failure.error} (rank {failure.rank}{place})"
    if failure is not None:
        return f"exit code {failure.exit_code} (rank {failure.rank})"
    if item.get("exit_code") is not None:
        return f"exit code {item['exit_code']}"
    return status.word if status is not None else ""


def _queued_since(item: Mapping[str, Any], status: JobStatus) -> bool:
    """Whether the task waits, or has started, after all that the trial's own files tell."""
    start, end = item.get("started"), item.get("ended")
    if status.state is JobState.PENDING:
        return max(start or 0, end or 0) <= status.observed_at
    return status.state is JobState.RUNNING and end is not None and end < (status.start_time or 0)


def _task_states(view: RunView) -> dict[int, JobStatus]:
    found: dict[int, JobStatus] = {}
    for status in view.statuses:
        task = status.job_id.partition("_")[2]
        if task.isdecimal():
            found[int(task)] = status
        elif task.startswith("["):
            ranges = task_ranges(task)
            found |= {index: status for one in ranges for index in one}
    if view.terminal:  # tasks that Slurm does not list any more
        state = JobState.CANCELLED if view.record.job_id else JobState.UNKNOWN
        rest = JobStatus(job_id=view.record.job_id or "", state=state)
        count = sum(1 for _ in json_lines(Path(view.record.folder) / TRIALS))
        found = {**dict.fromkeys(range(count), rest), **found}
    return found


def resume(
    context: Context,
    selector: str,
    cluster: str | None = None,
    progress: Progress = lambda *_: None,
    records: list[JobRecord] | None = None,
) -> list[JobRecord]:
    """Queue again the trials of a sweep that failed or never ran; each goes on from its own checkpoints.

    Args:
        records: each new run is added to it as soon as it is queued.

    Returns:
        The new runs; none where there is nothing to do.

    Raises:
        RequestInvalid: some are still to run, what was asked for is not to be had any more, or another
            process is resuming it.
    """
    head, _ = _members(context, find(context, selector, cluster))
    # From the look to the note of what was queued, else each of two queues the same trials. It lies beside
    # the members that it guards, in this machine's copy of a far sweep: it covers all that share those files,
    # not another machine with a copy of its own.
    with try_lock(Path(head.folder) / _RESUMING) as alone_here:
        if not alone_here:
            raise RequestInvalid(
                [f"{selector}: another dtslurm is resuming this sweep just now; nothing was queued"],
                hint=f"dtslurm sweep status {selector} shows what it has queued, once it is done",
            )
        return _resume(context, selector, cluster, progress, [] if records is None else records)


def _resume(
    context: Context, selector: str, cluster: str | None, progress: Progress, records: list[JobRecord]
) -> list[JobRecord]:
    sweep = look(context, selector, cluster)
    waiting = [trial for trial in sweep.trials if trial.state in {WAITING, RUNNING}]
    if waiting:
        raise RequestInvalid(
            [f"{selector}: {pluralize(len(waiting), 'trial')} still to run"],
            hint=f"dtslurm sweep status {selector} shows them; dtslurm sweep stop {selector} ends them",
        )
    again = [trial for trial in sweep.trials if trial.state in {FAILED, NEVER}]
    if not again:
        return []
    trials = [Trial(one.number, one.name, one.values, _checkpoints(one)) for one in again]
    there, request = asked_for(sweep.head)
    sweeping = arrays(there, request, sweep.settings, iter(trials))
    try:
        submit_sweep(there, sweeping, "", records, progress)
    except SubmitInterrupted as interrupt:
        if interrupt.record is not None:
            records.append(interrupt.record)
        raise
    finally:  # those that were queued are this sweep's
        save_members(context, sweep.head, [*sweep.runs, *records])
    return records


def _checkpoints(trial: TrialView) -> str:
    return f"{trial.folder}/checkpoints" if trial.folder else ""


def stop(context: Context, selector: str, cluster: str | None = None) -> list[str]:
    """Cancel what runs or waits of a sweep; return the job ids."""
    head, runs = _members(context, find(context, selector, cluster))
    alive = [view.record for view in views(context, runs) if not view.terminal and view.record.job_id]
    tokens = [record.token for record in alive]
    return control.act(context, "cancel", tokens, head.cluster).done if tokens else []
