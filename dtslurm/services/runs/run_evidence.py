"""What a run's own files tell of its job, whatever the scheduler says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import localtime, strftime
from typing import Any

from dtslurm.diagnose.ranks_apart import NOT_DISTRIBUTED, RanksApart, find_ranks_apart
from dtslurm.diagnose.supervisor_events import SUPERVISOR_STOPPED, find_killed_script, find_stopped_supervisor
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.units import LARGEST_SKEW_S
from dtslurm.services.runs.records import looked_for_until
from dtslurm.store.rundir import RunDir

_MANY_TASKS = 256
_NOTICED_S = 120.0  # the scheduler knows by then that a script has ended, unless the node's daemon is gone
UNNOTICED = (
    "its script has ended, and Slurm does not notice: what kept the job on its first node was killed; "
    "cancel it to free the nodes"
)
NOT_STARTED_AGAIN = (
    "Slurm queued it once more and could not start it: its script did not get as far as to record that start"
)


def apply_events(status: JobStatus, run: RunDir | None) -> JobStatus:
    """Return an observation with what the run's own record tells of since: a start, or an end.

    An end of the very start that the scheduler takes for running counts too, though it was told before: the
    word of it has not come there yet (a controller that was away), or nobody is left to bring it.
    """
    word, time = last_word(run) if run is not None else (None, 0)
    if word is None or status.terminal:
        return status
    ended = word.get("event") == "ended"
    runs_since = status.start_time if status.state is JobState.RUNNING else None
    of_this_start = ended and runs_since is not None and time >= runs_since
    if time <= status.observed_at and not of_this_start:
        return status
    if word.get("event") == "started" and status.state is JobState.PENDING:
        started = replace(status, state=JobState.RUNNING, flags=frozenset(), raw_state="", reason="")
        left = status.time_left  # of a job that waits, its whole time limit
        if left is not None:
            left += int(time - status.observed_at)
        return replace(started, start_time=time, time_left=left, estimated_start=None, source="record")
    if ended and status.state in {JobState.PENDING, JobState.RUNNING}:
        code, unnoticed = word.get("exit_code"), status.observed_at - time > _NOTICED_S
        over = replace(
            status,
            state=JobState.FAILED if code else JobState.COMPLETED,
            flags=frozenset({StateFlag.COMPLETING}),
            reason=UNNOTICED
            if unnoticed
            else "its script has ended, which the scheduler has not confirmed yet",
        )
        return replace(over, exit_code=code, end_time=time, time_left=None, source="record")
    return status


def places(record: JobRecord) -> dict[str, RunDir]:
    """Return the folders in which a run's script keeps its records, by job id: one, or one per array task.

    Empty for an array of so many tasks that reading all of them takes longer than asking.
    """
    if record.job_id is None:
        return {}
    run = RunDir(Path(record.folder))
    if record.array is None:
        return {record.job_id: run}
    tasks = run.tasks()
    if len(tasks) > _MANY_TASKS:
        return {}
    return {f"{record.job_id}_{task}": place for task, place in tasks.items()}


def told_of_its_end(record: JobRecord, task: str = "") -> bool:
    """Whether the script of a run, or of one array task of it, says that it has ended; nobody is asked."""
    folder = Path(record.folder)
    return end_of(RunDir(folder / "tasks" / task if task else folder)) is not None


def own_evidence(record: JobRecord, now: float) -> tuple[JobStatus, ...]:
    """Return what the run's own files tell when the scheduler tells nothing: one status, or one per task.

    Only an ``ended`` event written by the script itself, newer than any ``started``, is an end.
    """
    if record.phase == "withdrawn":
        reason = "sbatch's answer was lost and no job came of it; submitting again is safe"
        never = JobStatus(job_id="", state=JobState.CANCELLED, reason=reason, name=record.name)
        return (replace(never, source="record", observed_at=now),)
    if record.job_id is None:
        unknown = JobStatus(
            job_id="", state=JobState.UNKNOWN, reason=_looked_for(record, now), name=record.name
        )
        return (replace(unknown, observed_at=now),)
    run = RunDir(Path(record.folder))
    if record.array is None:
        return (_own_status(run, record, record.job_id, now),)

    tasks = run.tasks()
    told = tuple(_own_status(place, record, f"{record.job_id}_{task}", now) for task, place in tasks.items())
    from dtslurm.checks.job_checks import array_indices

    if len(tasks) < len(array_indices(record.array)):
        rest = _own_status(run, record, f"{record.job_id}_[]", now)
        told = (*told, replace(rest, reason=f"no trace of the other tasks of {record.array}"))
    return told


def _looked_for(record: JobRecord, now: float) -> str:
    """Say that it will be known soon whether a submission whose answer was lost has a job."""
    until = looked_for_until(record)
    when = strftime("until %H:%M:%S", localtime(until)) if now < until else "once the scheduler answers"
    return f"sbatch's answer was lost; whether there is a job is not known yet: looked for again {when}"


def _own_status(run: RunDir, record: JobRecord, job_id: str, now: float) -> JobStatus:
    base = JobStatus(
        job_id=job_id,
        state=JobState.UNKNOWN,
        name=record.name,
        reason="the scheduler does not know this job (any more), and it left no record of its end",
        observed_at=now,
    )
    end = end_of(run)
    if end is None:
        return base
    code, time = end
    state = JobState.COMPLETED if code == 0 else JobState.FAILED
    return replace(base, state=state, exit_code=code, reason="", end_time=time, source="record")


def last_word(run: RunDir) -> tuple[dict[str, Any] | None, int]:
    """Return the script's own last word of a start or end and when it was said; None, 0 if it said none."""
    told = [event for event in run.events() if event.get("event") in {"started", "ended"}]
    time = told[-1].get("time") if told else None
    return (told[-1], _not_ahead(int(time), run)) if told and isinstance(time, int | float) else (None, 0)


def _not_ahead(time: int, run: RunDir) -> int:
    """Return an event's time, at most that of the last change of its file: the node's clock may be ahead."""
    try:
        changed = int((run.path / "events.jsonl").stat().st_mtime)
    except OSError:
        return time
    return changed if changed < time <= changed + LARGEST_SKEW_S else time


def end_of(run: RunDir) -> tuple[int, int | None] | None:
    """Return (exit code, time) of the script's own last word, None if it has started since or said none."""
    told = [event for event in run.events() if event.get("event") in {"started", "ended"}]
    if not told or told[-1]["event"] != "ended" or not isinstance(told[-1].get("exit_code"), int):
        return None
    time = told[-1].get("time")
    return told[-1]["exit_code"], int(time) if isinstance(time, int | float) else None


def reconcile_with_records(record: JobRecord, status: JobStatus) -> JobStatus:
    """Return an end with what accounting gets wrong and the run's own script wrote down.

    sacct of 22.05 turns exit code 137 into 9, and for a moment after the end it lists only some of the nodes.
    """
    wrong_code = status.state is JobState.FAILED and not status.signal and status.exit_code != 0
    wrong_nodes = status.terminal and _lists_too_few(status)
    if not (wrong_code or wrong_nodes):
        return status
    run = RunDir(Path(record.folder))
    if record.array is not None:
        run = run.task(status.job_id.rpartition("_")[2]) or run
    end = end_of(run) if wrong_code else None
    started = [event for event in run.events() if event.get("event") == "started"]
    if wrong_nodes and started and isinstance(started[-1].get("nodes"), str):
        status = replace(status, nodelist=started[-1]["nodes"])
    if wrong_code and started and end is None and not record.mirror and _starts_again(status, started[-1]):
        return replace(status, reason=NOT_STARTED_AGAIN)
    return replace(status, exit_code=end[0]) if end and end[0] else status


def _starts_again(status: JobStatus, started: dict[str, Any]) -> bool:
    """Tell whether Slurm counts a start after the last one that the script recorded.

    It ends a requeued job with exit code 1 where the node takes its credential for revoked (22.05).
    """
    attempt = started.get("attempt")
    return isinstance(attempt, int) and (status.restarts or 0) > attempt


def _lists_too_few(status: JobStatus) -> bool:
    if (status.nodes or 1) < 2 or not status.nodelist:
        return False
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return len(NodeSet(status.nodelist)) < (status.nodes or 1)
    except NodeSetException:
        return False


_BY_SLURM = {
    JobState.TIMEOUT: "the time limit was reached",
    JobState.DEADLINE: "its deadline was reached",
    JobState.CANCELLED: "cancelled",
    JobState.PREEMPTED: "preempted",
}
_SIGNALLED = {128 + 9, 128 + 15}  # exit codes of ranks that Slurm ends


def ended_by_slurm(run: RunDir, status: JobStatus, code: int) -> str:
    """Return why Slurm ended a job, empty if a rank's exit code tells that the rank ended by itself."""
    if code not in _SIGNALLED:
        return ""
    if status.state is JobState.FAILED:
        return find_killed_script(run.events(), status.signal)
    return _BY_SLURM.get(status.state, "")


def attempt_number(run: RunDir, status: JobStatus) -> int:
    """Return which attempt a job is or was last in.

    Slurm counts requeues alone, and anew where the controller lost its state; the folders of logs count all.
    """
    counted = status.restarts or 0
    return counted if status.state is JobState.PENDING else max([counted, *run.attempts()])


def ranks_apart(record: JobRecord, run: RunDir) -> RanksApart | None:
    """Return what was seen of ranks that train apart in the newest attempt, None if nothing was."""
    return find_ranks_apart(run.events()) if record.world_size > 1 else None


def marks_of(record: JobRecord, run: RunDir) -> list[str]:
    """Return the marks of a running job that a list shows first: what its ranks or its supervisor lack."""
    apart = ranks_apart(record, run)
    marks = [NOT_DISTRIBUTED] if apart is not None and apart.is_fault else []
    return [*marks, *([SUPERVISOR_STOPPED] if find_stopped_supervisor(run.events()) else [])]


def failure_in_words(run: RunDir, status: JobStatus) -> str:
    """Return in a few words how a job that did not do what it should came to its end."""
    attempts = run.attempts()
    failure = run.first_failure(attempts[-1]) if attempts else None
    if status.reason == NOT_STARTED_AGAIN:
        return NOT_STARTED_AGAIN
    if failure:
        rank, code = failure
        if code == WANTS_REQUEUE:
            return f"rank {rank} saved and ended with {code}, to go on in another start"
        error = run.first_error(attempts[-1])
        failed = f"{error} (rank {rank})" if error else f"rank {rank} failed first, exit code {code}"
        return ended_by_slurm(run, status, code) or failed
    if status.exit_code:
        return f"exit code {status.exit_code}"
    if status.signal:
        from dtslurm.slurm.parse import exit_words

        return exit_words(None, status.signal)
    if status.reason in {"", "None"}:
        return ""
    if status.source == "record":  # our own words, none of Slurm's
        return status.reason
    from dtslurm.slurm.pending import explain, only_waits

    return "" if only_waits(status.reason) else explain(status.reason).text
