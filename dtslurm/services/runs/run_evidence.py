"""Evidence about a job from the run directory, independent of the scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import localtime, strftime
from typing import Any

from dtslurm.diagnose.ranks_apart import NOT_DISTRIBUTED, RanksApart, find_ranks_apart
from dtslurm.diagnose.supervisor_events import (
    SUPERVISOR_STOPPED,
    describe_role_failure,
    find_killed_script,
    find_role_failure,
    find_stopped_supervisor,
)
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.units import LARGEST_SKEW_S
from dtslurm.services.runs.records import looked_for_until
from dtslurm.slurm.arrays import is_step_id
from dtslurm.store.rundir import RunDir

_MANY_TASKS = 256
_END_REPORTED_S = 120.0  # Slurm reports the end of a script by then, unless the node's Slurm daemon is gone
UNNOTICED = (
    "the batch script has ended, but Slurm still shows the job as running: the process that held the "
    "job on its first node was killed; cancel the job to free the nodes"
)
NOT_STARTED_AGAIN = "Slurm requeued the job and could not start it: the batch script recorded no new start"


def apply_events(status: JobStatus, run: RunDir | None) -> JobStatus:
    """Update a status from a newer start or end event in the run directory.

    An ``ended`` event older than the observation counts too if it belongs to the start that Slurm still shows
    as running: the controller was down when the script ended, or the node's Slurm daemon is gone.
    """
    event, time = last_start_or_end(run) if run is not None else (None, 0)
    if event is None or status.terminal:
        return status
    is_end = event.get("event") == "ended"
    running_since = status.start_time if status.state is JobState.RUNNING else None
    ends_this_start = is_end and running_since is not None and time >= running_since
    if time <= status.observed_at and not ends_this_start:
        return status
    if event.get("event") == "started" and status.state is JobState.PENDING:
        running_status = replace(status, state=JobState.RUNNING, flags=frozenset(), raw_state="", reason="")
        time_left = status.time_left  # for a pending job, the whole time limit
        if time_left is not None:
            time_left += int(time - status.observed_at)
        return replace(
            running_status, start_time=time, time_left=time_left, estimated_start=None, source="record"
        )
    if is_end and status.state in {JobState.PENDING, JobState.RUNNING}:
        code, is_unnoticed = event.get("exit_code"), status.observed_at - time > _END_REPORTED_S
        ended_status = replace(
            status,
            state=JobState.FAILED if code else JobState.COMPLETED,
            flags=frozenset({StateFlag.COMPLETING}),
            reason=UNNOTICED
            if is_unnoticed
            else "the batch script has ended; the scheduler has not confirmed the end yet",
        )
        return replace(ended_status, exit_code=code, end_time=time, time_left=None, source="record")
    return status


def event_folders(record: JobRecord) -> dict[str, RunDir]:
    """Return the folders of a run's event files by job id: the run directory, or one folder per array task.

    Empty for an array with so many tasks that reading their files takes longer than querying the scheduler.
    """
    if record.job_id is None:
        return {}
    run = RunDir(Path(record.folder))
    if record.array is None:
        return {record.job_id: run}
    tasks = run.tasks()
    if len(tasks) > _MANY_TASKS:
        return {}
    return {f"{record.job_id}_{task}": task_run for task, task_run in tasks.items()}


def has_recorded_end(record: JobRecord, task: str = "") -> bool:
    """Return whether a run or one array task recorded its end; the scheduler is not queried."""
    folder = Path(record.folder)
    return find_recorded_end(RunDir(folder / "tasks" / task if task else folder)) is not None


def status_from_run_files(record: JobRecord, now: float) -> tuple[JobStatus, ...]:
    """Return the status from the run's files for a job that the scheduler does not know; one per array task.

    Only an ``ended`` event that the script wrote after its last ``started`` event counts as an end.
    """
    if record.phase == "withdrawn":
        reason = "the answer of sbatch was lost, and Slurm created no job; you can submit again"
        withdrawn_status = JobStatus(job_id="", state=JobState.CANCELLED, reason=reason, name=record.name)
        return (replace(withdrawn_status, source="record", observed_at=now),)
    if record.job_id is None:
        unknown_status = JobStatus(
            job_id="", state=JobState.UNKNOWN, reason=_describe_lookup(record, now), name=record.name
        )
        return (replace(unknown_status, observed_at=now),)
    run = RunDir(Path(record.folder))
    if record.array is None:
        return (_status_from_events(run, record, record.job_id, now),)

    tasks = run.tasks()
    statuses = tuple(
        _status_from_events(task_run, record, f"{record.job_id}_{task}", now)
        for task, task_run in tasks.items()
    )
    from dtslurm.checks.job_checks import parse_array_indices

    if len(tasks) < len(parse_array_indices(record.array)):
        other_tasks = _status_from_events(run, record, f"{record.job_id}_[]", now)
        statuses = (*statuses, replace(other_tasks, reason=f"no record of the other tasks of {record.array}"))
    return statuses


def _describe_lookup(record: JobRecord, now: float) -> str:
    """Describe until when dtslurm looks for the job of a submission whose answer from sbatch was lost."""
    end_time = looked_for_until(record)
    deadline_text = (
        strftime("until %H:%M:%S", localtime(end_time)) if now < end_time else "when the scheduler answers"
    )
    return (
        "the answer of sbatch was lost, and it is not known whether Slurm created a job; dtslurm "
        f"searches for the job {deadline_text}"
    )


def _status_from_events(run: RunDir, record: JobRecord, job_id: str, now: float) -> JobStatus:
    base = JobStatus(
        job_id=job_id,
        state=JobState.UNKNOWN,
        name=record.name,
        nodelist=_find_last_nodes(run),
        reason="the scheduler has no record of this job, and the run directory has no record of its end",
        observed_at=now,
    )
    end = find_recorded_end(run)
    if end is None:
        return base
    code, time = end
    state = JobState.COMPLETED if code == 0 else JobState.FAILED
    if code and is_step_id(job_id) and any(event.get("event") == "cancel" for event in run.events()):
        state = JobState.CANCELLED  # squeue does not show the end of a step, and accounting may be off
    return replace(base, state=state, exit_code=code, reason="", end_time=time, source="record")


def _find_last_nodes(run: RunDir) -> str:
    """Return the nodes of the last start that the run's script recorded, empty if there is none."""
    nodes = [event.get("nodes") for event in run.events() if event.get("event") == "started"]
    return nodes[-1] if nodes and isinstance(nodes[-1], str) else ""


def last_start_or_end(run: RunDir) -> tuple[dict[str, Any] | None, int]:
    """Return the last ``started`` or ``ended`` event and its time; (None, 0) if there is none."""
    events = [event for event in run.events() if event.get("event") in {"started", "ended"}]
    time = events[-1].get("time") if events else None
    return (events[-1], _cap_time(int(time), run)) if events and isinstance(time, int | float) else (None, 0)


def _cap_time(time: int, run: RunDir) -> int:
    """Return an event's time, capped at the mtime of the event file: the node's clock may be ahead."""
    try:
        changed = int((run.path / "events.jsonl").stat().st_mtime)
    except OSError:
        return time
    return changed if changed < time <= changed + LARGEST_SKEW_S else time


def find_recorded_end(run: RunDir) -> tuple[int, int | None] | None:
    """Return (exit code, time) of the ``ended`` event; None if there is none after the last ``started``."""
    events = [event for event in run.events() if event.get("event") in {"started", "ended"}]
    if not events or events[-1]["event"] != "ended" or not isinstance(events[-1].get("exit_code"), int):
        return None
    time = events[-1].get("time")
    return events[-1]["exit_code"], int(time) if isinstance(time, int | float) else None


def reconcile_with_records(record: JobRecord, status: JobStatus) -> JobStatus:
    """Correct an end in accounting from the events that the run's script recorded.

    sacct 22.05 turns exit code 137 into 9, and for a moment after the end it lists only some of the nodes.
    Of a run in an allocation, Slurm lists only the node of the batch script.
    """
    has_wrong_code = status.state is JobState.FAILED and not status.signal and status.exit_code != 0
    has_wrong_nodes = is_step_id(status.job_id) or (status.terminal and _lists_too_few_nodes(status))
    if not (has_wrong_code or has_wrong_nodes):
        return status
    run = RunDir(Path(record.folder))
    if record.array is not None:
        run = run.task(status.job_id.rpartition("_")[2]) or run
    end = find_recorded_end(run) if has_wrong_code else None
    start_events = [event for event in run.events() if event.get("event") == "started"]
    if has_wrong_nodes:
        status = replace(status, nodelist=_find_last_nodes(run) or status.nodelist)
    if (
        has_wrong_code
        and start_events
        and end is None
        and not record.mirror
        and _has_unrecorded_restart(status, start_events[-1])
    ):
        return replace(status, reason=NOT_STARTED_AGAIN)
    return replace(status, exit_code=end[0]) if end and end[0] else status


def _has_unrecorded_restart(status: JobStatus, start_event: dict[str, Any]) -> bool:
    """Return whether Slurm counts a restart after the last start that the script recorded.

    Slurm 22.05 ends a requeued job with exit code 1 if the node considers its credential revoked.
    """
    attempt = start_event.get("attempt")
    return isinstance(attempt, int) and (status.restarts or 0) > attempt


def _lists_too_few_nodes(status: JobStatus) -> bool:
    if (status.nodes or 1) < 2 or not status.nodelist:
        return False
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return len(NodeSet(status.nodelist)) < (status.nodes or 1)
    except NodeSetException:
        return False


_REASONS_BY_STATE = {
    JobState.TIMEOUT: "the time limit was reached",
    JobState.DEADLINE: "the deadline was reached",
    JobState.CANCELLED: "cancelled",
    JobState.PREEMPTED: "preempted",
}
_SIGNAL_EXIT_CODES = {128 + 9, 128 + 15}  # exit codes of ranks that Slurm kills with SIGKILL or SIGTERM


def ended_by_slurm(run: RunDir, status: JobStatus, code: int) -> str:
    """Return why Slurm ended a job; empty if the exit code shows that the rank ended by itself."""
    if code not in _SIGNAL_EXIT_CODES:
        return ""
    if status.state is JobState.FAILED:
        return find_killed_script(run.events(), status.signal)
    return _REASONS_BY_STATE.get(status.state, "")


def attempt_number(run: RunDir, status: JobStatus) -> int:
    """Return the number of a job's current or last attempt.

    Slurm counts only requeues, and from 0 again if the controller lost its state; the log folders count all.
    """
    restarts = status.restarts or 0
    return restarts if status.state is JobState.PENDING else max([restarts, *run.attempts()])


def ranks_apart(record: JobRecord, run: RunDir) -> RanksApart | None:
    """Return the evidence that ranks train independently in the newest attempt; None if there is none."""
    return find_ranks_apart(run.events()) if record.world_size > 1 else None


def list_warnings(record: JobRecord, run: RunDir) -> list[str]:
    """Return a running job's warnings for the run list: ranks not distributed, supervisor stopped."""
    observation = ranks_apart(record, run)
    warnings = [NOT_DISTRIBUTED] if observation is not None and observation.is_fault else []
    return [*warnings, *([SUPERVISOR_STOPPED] if find_stopped_supervisor(run.events()) else [])]


def describe_failure(run: RunDir, status: JobStatus) -> str:
    """Describe in a few words how a failed job ended."""
    role_failure = find_role_failure(run.events())
    return describe_role_failure(role_failure) if role_failure else _describe_rank_failure(run, status)


def _describe_rank_failure(run: RunDir, status: JobStatus) -> str:
    attempts = run.attempts()
    failure = run.first_failure(attempts[-1]) if attempts else None
    if status.reason == NOT_STARTED_AGAIN:
        return NOT_STARTED_AGAIN
    if failure:
        rank, code = failure
        if code == WANTS_REQUEUE:
            return f"rank {rank} saved a checkpoint and ended with {code}, which requests a requeue"
        error = run.first_error(attempts[-1])
        description = f"{error} (rank {rank})" if error else f"rank {rank} failed first, exit code {code}"
        return ended_by_slurm(run, status, code) or description
    if status.exit_code:
        return f"exit code {status.exit_code}"
    if status.signal:
        from dtslurm.slurm.parse import describe_exit

        return describe_exit(None, status.signal)
    if status.reason in {"", "None"}:
        return ""
    if status.source == "record":  # the reason is dtslurm's text, not a Slurm reason
        return status.reason
    from dtslurm.slurm.pending import explain, only_explains_waiting

    return "" if only_explains_waiting(status.reason) else explain(status.reason).text
