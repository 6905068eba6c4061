"""What a run has been through: its attempts and how each ended, out of its own records and accounting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass
from dtslurm.scheduler.base import SharedScheduler
from dtslurm.services.preflight.bad_nodes import learn
from dtslurm.services.runs.changed_script import is_changed, submitted_hash
from dtslurm.services.runs.run_times import Attempt, attempts_of
from dtslurm.services.runs.status import RunView
from dtslurm.services.runs.sync import refresh
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.parse import exit_words
from dtslurm.store.rundir import RunDir


@dataclass(frozen=True)
class History:
    """Attempts, oldest first, and the run's events in their order."""

    attempts: tuple[Attempt, ...]
    events: tuple[Mapping[str, Any], ...]


def history(context: Context, view: RunView) -> History:
    """Return what a run has been through; accounting is asked if its own records leave something open."""
    record = view.record
    with suppress(DtslurmError):  # what is here is told
        refresh(context, [record])
    learn(context, record)
    run = RunDir(Path(record.folder))
    events = queued_first(run.events())
    found = attempts_of(events)
    if any(not attempt.how for attempt in found[:-1]):
        found = _with_accounts(found, _accounts(context, record))
    submitted = submitted_hash(record)
    told = [
        replace(attempt, script_changed=is_changed(submitted, run, attempt.number))
        for attempt in _last_words(found, view)
    ]
    return History(tuple(told), tuple(events))


def queued_first(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put a run's submission before its start, where the job was faster than sbatch's answer."""
    kinds = [event.get("event") for event in events]
    if "submitted" not in kinds or "started" not in kinds:
        return list(events)
    queued, started = kinds.index("submitted"), kinds.index("started")
    if queued < started:
        return list(events)
    return [*events[:started], events[queued], *events[started:queued], *events[queued + 1 :]]


def _accounts(context: Context, record: JobRecord) -> list[JobStatus]:
    scheduler = context.cluster_of(record).scheduler
    if record.job_id is None or not isinstance(scheduler, SharedScheduler):
        return []
    try:
        return [run for run in scheduler.runs(record.job_id) if run.job_id == record.job_id]
    except DtslurmError:
        return []


def _with_accounts(attempts: Sequence[Attempt], runs: Sequence[JobStatus]) -> list[Attempt]:
    """Fill in what accounting says of attempts that left no word: the run that began when they did."""
    filled = []
    for attempt in attempts:
        near = [
            run
            for run in runs
            if run.start_time is not None
            and attempt.started is not None
            and abs(run.start_time - attempt.started) < 60
        ]
        if not attempt.how and near:
            run = min(near, key=lambda one: abs((one.start_time or 0) - (attempt.started or 0)))
            filled.append(
                replace(attempt, ended=attempt.ended or run.end_time, how=f"Slurm: {run.raw_state}")
            )
        else:
            filled.append(attempt)
    return filled


def _last_words(attempts: Sequence[Attempt], view: RunView) -> list[Attempt]:
    """Say of attempts without a word what can be said."""
    told = []
    for attempt in attempts:
        how = attempt.how
        if not how and attempt is not attempts[-1]:
            how = "no word of its end: preempted, requeued, or a node was lost"
        elif not how:
            status = view.statuses[0]
            how = "goes on" if not status.terminal else exit_words(status.exit_code, status.signal)
            how = how or status.word
        told.append(replace(attempt, how=how))
    return told
