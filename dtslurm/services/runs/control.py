"""Cancel, requeue, hold and release the jobs of runs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dtslurm.errors import (
    DtslurmError,
    JobNotFound,
    RequestInvalid,
    SlurmError,
    SlurmUnavailable,
    StoreError,
)
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobStatus
from dtslurm.scheduler.base import Look, PartialResult, Scheduler
from dtslurm.scheduler.job_table import JobTable
from dtslurm.services.runs.job_identity import belongs_to_run, describe_job, describe_reused_id
from dtslurm.services.runs.monitor import invalidating_cache
from dtslurm.services.runs.queued_jobs import UNRECORDED, find_queued_job
from dtslurm.services.runs.records import append_event, save
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm.arrays import array_of_task, base_id, is_step_id
from dtslurm.store.rundir import RunDir
from dtslurm.worker.delivery import reclaim

# Remove the stop and done files, which keep the job from starting; array tasks have their own.
# Touch the event file first, so that a concurrent clean notices the requeue: see `reclaim.has_revived`.
_ALLOW_START = """touch -c -- "$1/events.jsonl"
[ -d "$1" ] || exit 4
if [ "$(cat -- "$1/stop" 2>/dev/null)" = "$3" ]; then exit 3; fi
rm -f -- "$1/stop" "$2/stop" "$2/done" "$2"/tasks/*/done "$2"/tasks/*/stop
"""
_REFUSALS = {
    3: "the run cannot start again, because `dtslurm clean` deleted its code or secrets",
    4: "the run cannot start again, because its run directory {} does not exist",
}
NO_REQUEUE = "#SBATCH --no-requeue"
SECRETS_DELETED = "# The supervisor deletes the secrets at the end of the run."  # a line of the job script
DONE = {"cancel": "cancelled", "requeue": "requeued", "hold": "held", "release": "released"}


class JobChanges(NamedTuple):
    """The job ids that were changed, the ended ones with their state, and those that were already pending."""

    done: list[str]
    ended: dict[str, str]
    waiting: list[str]

    def lines(self, verb: str) -> list[str]:
        """Return one line of text for each kind of outcome."""
        done_lines = [f"{DONE[verb]}: {', '.join(self.done)}"] if self.done else []
        waiting_lines = [f"already pending: {', '.join(self.waiting)}"] if self.waiting else []
        return [
            *done_lines,
            *(f"{job_id} had already ended: {state}" for job_id, state in self.ended.items()),
            *waiting_lines,
        ]


def change_jobs(
    context: Context, verb: str, selectors: Sequence[str], cluster: str | None = None
) -> JobChanges:
    """Cancel, requeue, hold or release every selected run or array task.

    All selectors are resolved before any job is changed. A run that is known to have ended is cancelled too,
    because Slurm may have requeued its job.

    Raises:
        JobNotFound, RequestInvalid: a selector matches no run, or its run has no job; no job was changed.
        JobNotFound: the job with the run's job id belongs to another run; no job was changed on its cluster.
        SlurmError: Slurm refused the change of all or some jobs; its messages are the evidence.
    """
    pairs_by_route: dict[tuple[str, str, str, bool], list[tuple[str, JobRecord]]] = defaultdict(list)
    for selector in selectors:
        record = _find_record(context, verb, selector, cluster)
        if record.job_id is None:
            raise RequestInvalid([f"{selector}: the job of this run is not known yet; see dtslurm status"])
        if is_step_id(record.job_id) and verb != "cancel":
            raise RequestInvalid(
                [f"{selector}: a run in an allocation cannot be {DONE[verb]}"],
                hint=f"dtslurm submit --in {base_id(record.job_id)} SCRIPT starts a run in it",
            )
        target = selector if array_of_task(selector) == record.job_id else record.job_id
        if verb == "requeue":
            _refuse_without_secrets(target, record)
        pairs_by_route[record.route].append((target, record))
    changes = JobChanges([], {}, [])
    for pairs in pairs_by_route.values():
        active_cluster = context.cluster_of(pairs[0][1])
        with invalidating_cache(context, active_cluster):
            partial_result = _change_on_cluster(context, active_cluster, verb, pairs)
        for target, record in pairs:
            if partial_result is not None and target not in partial_result.done:
                continue
            final_state = _describe_known_end(target, record) if verb == "cancel" else ""
            if final_state:
                changes.ended[target] = final_state
            else:
                _record_change(context, verb, target, record)
                changes.done.append(target)
        if partial_result is not None:
            changes.waiting.extend(partial_result.waiting)
            _raise_refusals(verb, partial_result, pairs)
    return changes


def cancel_in_allocation(context: Context, record: JobRecord) -> str:
    """Cancel a run in an allocation after Ctrl-C; return a message about it."""
    run, allocation = record.job_id or "", base_id(record.job_id or "")
    try:
        change_jobs(context, "cancel", [record.token])
    except DtslurmError as error:
        return f"run {run} could not be cancelled: {error.message}; dtslurm cancel {run} tries it again"
    return f"cancelled: {run}; allocation {allocation} stays"


def _find_record(context: Context, verb: str, selector: str, cluster: str | None) -> JobRecord:
    """Return the run that a selector names; for cancel, a job in the queue without a record is enough.

    Raises:
        JobNotFound, StoreError, RequestInvalid: as `find`.
    """
    try:
        return find(context, selector, cluster)
    except (JobNotFound, StoreError):
        view = find_queued_job(context, selector, cluster) if verb == "cancel" else None
        if view is None:
            raise
        return view.record


def _refuse_without_secrets(target: str, record: JobRecord) -> None:
    """Refuse to requeue a run whose secrets were deleted at its end.

    Raises:
        RequestInvalid: the run has ended, and its script needs secrets.
    """
    if (
        record.array is None
        and _describe_known_end(target, record)
        and SECRETS_DELETED in _read_script_lines(record)
    ):
        raise RequestInvalid(
            [f"{target}: the supervisor deleted the run's secrets when the run ended"],
            hint=f"dtslurm resubmit {target} --from-checkpoint submits the run again with the secrets",
        )


def _raise_refusals(verb: str, partial_result: PartialResult, pairs: Sequence[tuple[str, JobRecord]]) -> None:
    """Raise an error for the refused jobs, after the other jobs were recorded.

    Raises:
        SlurmError: Slurm refused some of the jobs.
    """
    if partial_result.refused:
        waiting_evidence = (
            [f"already pending: {', '.join(partial_result.waiting)}"] if partial_result.waiting else []
        )
        error = SlurmError(
            f"{verb}: Slurm refused some of the jobs; the others were changed",
            evidence=[
                *partial_result.refused,
                *waiting_evidence,
                f"{DONE[verb]}: {', '.join(partial_result.done)}",
            ],
        )
        if verb == "requeue":
            _explain_no_requeue(error, pairs)
        raise error


def _describe_known_end(target: str, record: JobRecord) -> str:
    """Return the final states of a run or an array task; empty if no end is known."""
    statuses = JobTable(record.final).covering(target)
    return ", ".join(sorted({status.state.name for status in statuses if status.terminal}))


def _change_on_cluster(
    context: Context, cluster: ActiveCluster, verb: str, pairs: Sequence[tuple[str, JobRecord]]
) -> PartialResult | None:
    """Change jobs on one cluster after checking that they belong to the runs; None if all were changed."""

    def update_stop_files() -> None:
        for target, record in pairs:
            _update_stop_file(context, verb, target, record)

    def check_and_update(jobs_by_id: Mapping[str, Sequence[JobStatus]]) -> None:
        _refuse_foreign_jobs(pairs, jobs_by_id)
        update_stop_files()

    try:
        return _call_scheduler(cluster.scheduler, verb, [target for target, _ in pairs], check_and_update)
    except SlurmUnavailable:
        if verb == "cancel":  # the job itself reads the stop file
            update_stop_files()
        raise
    except JobNotFound as error:
        if verb == "requeue" and not error.hint:
            resubmit = _resubmit_command(pairs)
            error.hint = f"Slurm forgets jobs some minutes after their end; {resubmit} submits the run again"
        raise
    except SlurmError as error:
        if verb == "requeue":
            _explain_no_requeue(error, pairs)
        raise


def _explain_no_requeue(error: SlurmError, pairs: Sequence[tuple[str, JobRecord]]) -> None:
    """Add the jobs that were submitted with --no-requeue to an error, and how to submit them again."""
    names = [target for target, record in pairs if _forbids_requeue(record)]
    if not names:
        return
    reason = "the default for a run that cannot continue from checkpoints"
    error.evidence = (*error.evidence, f"{', '.join(names)}: submitted with --no-requeue, {reason}")
    job = pairs[0][0] if len(pairs) == 1 else "JOB"
    error.hint = (
        f"dtslurm cancel {job} ends the job if it still runs, and {_resubmit_command(pairs)} submits "
        "the run again; only runs that are submitted with --requeue can be requeued"
    )


def _forbids_requeue(record: JobRecord) -> bool:
    return NO_REQUEUE in _read_script_lines(record)


def _read_script_lines(record: JobRecord) -> list[str]:
    try:
        return (Path(record.folder) / RunDir.SCRIPT).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _resubmit_command(pairs: Sequence[tuple[str, JobRecord]]) -> str:
    """Return the command that submits a run again; for several runs, its general form with ``JOB``."""
    record = pairs[0][1]
    job = record.job_id if len(pairs) == 1 else "JOB"
    return f"dtslurm {'sweep resume' if record.sweep else 'resubmit'} {job}"


def _refuse_foreign_jobs(
    pairs: Sequence[tuple[str, JobRecord]], jobs_by_id: Mapping[str, Sequence[JobStatus]]
) -> None:
    """Refuse to change a job that belongs to another run; a job that Slurm does not list cannot be checked.

    Raises:
        JobNotFound: a listed job belongs to another run.
    """
    for target, record in pairs:
        statuses = jobs_by_id.get(target, ())
        if statuses and not any(belongs_to_run(record, status) for status in statuses):
            raise JobNotFound(
                f"{describe_reused_id(record)}; nothing was changed on {record.cluster}",
                evidence=[*map(describe_job, statuses[:3]), f"the run is {record.name}, {record.comment}"],
                hint=f"dtslurm status {record.job_id} shows the state of the run",
            )


def _call_scheduler(
    scheduler: Scheduler, verb: str, ids: Sequence[str], inspect_jobs: Look
) -> PartialResult | None:
    methods: dict[str, Callable[[Sequence[str], Look], PartialResult | None]] = {
        "cancel": scheduler.cancel,
        "requeue": scheduler.requeue,
        "hold": scheduler.hold,
        "release": scheduler.release,
    }
    return methods[verb](ids, inspect_jobs)


def _update_stop_file(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Write the stop file of a run to cancel, or remove that of a run to requeue, before Slurm acts.

    The stop file keeps a cancelled run from starting again.

    Raises:
        RequestInvalid: the run cannot be requeued, because its files were removed.
    """
    if verb not in {"cancel", "requeue"} or record.phase == UNRECORDED:  # its folder may be another run's
        return
    task = target.partition("_")[2]
    folder = f"{record.run_dir}/tasks/{task}" if task else record.run_dir
    if verb == "requeue":
        _allow_start(context, target, record, folder)
        return
    with contextlib.suppress(DtslurmError):  # only the scheduler's answer decides
        context.cluster_of(record).transport.put(b"cancelled by dtslurm\n", f"{folder}/stop")


def _allow_start(context: Context, target: str, record: JobRecord, folder: str) -> None:
    """Remove the stop and done files that keep the job of a run from starting again.

    Raises:
        RequestInvalid: the run's files were removed.
    """
    argv = ["sh", "-c", _ALLOW_START, "sh", record.run_dir, folder, reclaim.CLEANED.decode().strip()]
    try:
        code = context.cluster_of(record).transport.run(argv).code
    except DtslurmError:
        return  # only the scheduler's answer decides
    if code in _REFUSALS:
        raise RequestInvalid(
            [f"{target}: {_REFUSALS[code].format(record.run_dir)}"],
            hint=f"{_resubmit_command([(target, record)])} submits the run again, with its code",
        )


def _record_change(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Append the change to the run's events; clear the final statuses of a requeued run."""
    if record.phase == UNRECORDED:
        return
    append_event(context, record, verb, job_id=target)
    if verb == "requeue" and record.final:
        save(context, replace(record, final=()))
