"""The history of a run: its attempts and how each ended, from the run directory and from accounting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.roles import RoleState
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass
from dtslurm.scheduler.base import SharedScheduler
from dtslurm.services.preflight.bad_nodes import store_run_notes
from dtslurm.services.runs.changed_script import is_changed, submitted_hash
from dtslurm.services.runs.run_times import Attempt, attempts_of
from dtslurm.services.runs.status import RunView
from dtslurm.services.runs.sync import refresh
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.parse import describe_exit
from dtslurm.store.rundir import RunDir
from dtslurm.views.role_states import FILE, parse_roles
from dtslurm.worker.lib.json_records import read_object


@dataclass(frozen=True)
class History:
    """The attempts of a run, oldest first, its events in order, and the state of its roles."""

    attempts: tuple[Attempt, ...]
    events: tuple[Mapping[str, Any], ...]
    roles: tuple[RoleState, ...] = ()


def history(context: Context, view: RunView) -> History:
    """Return the history of a run; query accounting if the end of an attempt was not recorded."""
    record = view.record
    with suppress(DtslurmError):  # the local copies still have the older events
        refresh(context, [record])
    store_run_notes(context, record)
    run = RunDir(Path(record.folder))
    events = move_submission_first(run.events())
    attempts = attempts_of(events)
    if any(not attempt.how for attempt in attempts[:-1]):
        attempts = _add_accounting(attempts, _query_accounting(context, record))
    submitted_digest = submitted_hash(record)
    described_attempts = [
        replace(attempt, script_changed=is_changed(submitted_digest, run, attempt.number))
        for attempt in _describe_ends(attempts, view)
    ]
    roles = parse_roles(read_object(str(run.path / FILE)).get("roles"))
    return History(tuple(described_attempts), tuple(events), roles)


def move_submission_first(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Move the ``submitted`` event before ``started``: the job may start before sbatch returns."""
    kinds = [event.get("event") for event in events]
    if "submitted" not in kinds or "started" not in kinds:
        return list(events)
    submitted_index, started_index = kinds.index("submitted"), kinds.index("started")
    if submitted_index < started_index:
        return list(events)
    return [
        *events[:started_index],
        events[submitted_index],
        *events[started_index:submitted_index],
        *events[submitted_index + 1 :],
    ]


def _query_accounting(context: Context, record: JobRecord) -> list[JobStatus]:
    scheduler = context.cluster_of(record).scheduler
    if record.job_id is None or not isinstance(scheduler, SharedScheduler):
        return []
    try:
        return [status for status in scheduler.runs(record.job_id) if status.job_id == record.job_id]
    except DtslurmError:
        return []


def _add_accounting(attempts: Sequence[Attempt], runs: Sequence[JobStatus]) -> list[Attempt]:
    """Fill in attempts whose end was not recorded from the accounting row that started within 60 s."""
    filled = []
    for attempt in attempts:
        matches = [
            status
            for status in runs
            if status.start_time is not None
            and attempt.started is not None
            and abs(status.start_time - attempt.started) < 60
        ]
        if not attempt.how and matches:
            status = min(matches, key=lambda match: abs((match.start_time or 0) - (attempt.started or 0)))
            filled.append(
                replace(attempt, ended=attempt.ended or status.end_time, how=f"Slurm: {status.raw_state}")
            )
        else:
            filled.append(attempt)
    return filled


def _describe_ends(attempts: Sequence[Attempt], view: RunView) -> list[Attempt]:
    """Describe the end of attempts that have no description yet."""
    described_attempts = []
    for attempt in attempts:
        description = attempt.how
        if not description and attempt is not attempts[-1]:
            description = "no recorded end: preempted, requeued, or a node was lost"
        elif not description:
            status = view.statuses[0]
            description = "running" if not status.terminal else describe_exit(status.exit_code, status.signal)
            description = description or status.word
        described_attempts.append(replace(attempt, how=description))
    return described_attempts
