"""Send the messages of runs that their jobs did not send, in a process of its own, without waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.worker.lib.json_records import read_object
from dtslurm.worker.notify.messages import PAUSE_S, RunState, is_due, list_messages

_LONGEST_S = 7 * 86400.0  # messages about older ends are not sent
_LEFT_TO_JOB_S = 30.0
_START_S = 20.0  # for a command that only starts a process


def send_left_messages(context: Context, runs: Iterable[tuple[JobRecord, JobStatus]]) -> None:
    """Start the program that sends what is left of the messages of these runs.

    The program runs where dtslurm runs the commands of the run's cluster, and claims each message: several
    clients may start it at the same time.
    """
    now = context.clock()
    for record, status in runs:
        if record.array is not None or not record.job_id:
            continue
        settings = read_object(str(Path(record.folder) / RunDir.NOTIFY))
        if not settings or now - context.messages_checked_at.get(record.token, 0.0) < PAUSE_S:
            continue
        state = _find_end_state(status, now)
        if state is None or not _has_due_message(record, settings, state, now):
            continue
        context.messages_checked_at[record.token] = now
        with contextlib.suppress(DtslurmError):  # the next command tries again
            _start_sender(context, record, str(settings.get("python") or "python3"), state)


def _find_end_state(status: JobStatus, now: float) -> str | None:
    """Return the state in which the scheduler reports the end: empty before, None if that was long ago."""
    if status.end_time is not None and now - status.end_time > _LONGEST_S:
        return None
    is_confirmed = status.terminal and status.source != "record" and status.state is not JobState.UNKNOWN
    return status.state.value if is_confirmed else ""


def _has_due_message(record: JobRecord, settings: dict[str, object], state: str, now: float) -> bool:
    addresses = settings.get("addresses")
    run = RunDir(Path(record.folder))
    events = run.events()
    cancelled = (run.path / "stop").exists()
    messages = list_messages(events, RunState(name=record.name, state=state, cancelled=cancelled))
    count = len(addresses) if isinstance(addresses, list) else 0
    return is_due(events, messages, count, now, _LEFT_TO_JOB_S if settings.get("from_job") else 0.0)


def _start_sender(context: Context, record: JobRecord, python: str, state: str) -> None:
    program = f"{record.run_dir}/supervisor"
    command = [python, program, "notify", record.run_dir, "--detach", f"--state={state}"]
    transport = context.cluster_of(record).transport if record.mirror else context.transport
    transport.run(command, timeout=_START_S)
