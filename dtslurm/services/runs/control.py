"""Change what queued jobs do: cancel, requeue, hold, release."""

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
from dtslurm.slurm.arrays import array_of_task
from dtslurm.store.rundir import RunDir
from dtslurm.worker.delivery import reclaim

# Removes the files that keep a job from starting as it was cancelled or is done. Tasks have their own.
# The events are touched first, for a clean that is under way: see `reclaim.has_revived`.
_ALLOW_START = """touch -c -- "$1/events.jsonl"
[ -d "$1" ] || exit 4
if [ "$(cat -- "$1/stop" 2>/dev/null)" = "$3" ]; then exit 3; fi
rm -f -- "$1/stop" "$2/stop" "$2/done" "$2"/tasks/*/done "$2"/tasks/*/stop
"""
_REFUSALS = {
    3: "`dtslurm clean` removed its code or secrets, so that it cannot start again",
    4: "its run directory {} is gone, so that it cannot start again",
}
NO_REQUEUE = "#SBATCH --no-requeue"
SECRETS_DELETED = "# The supervisor deletes the secrets at the end of the run."  # a line of the script
DONE = {"cancel": "cancelled", "requeue": "requeued", "hold": "held", "release": "released"}


class Acted(NamedTuple):
    """The job ids that were acted on, those known to be over (how they ended), and what waited already."""

    done: list[str]
    ended: dict[str, str]
    waiting: list[str]

    def lines(self, verb: str) -> list[str]:
        """Return what was done in words."""
        first = [f"{DONE[verb]}: {', '.join(self.done)}"] if self.done else []
        last = [f"already waiting: {', '.join(self.waiting)}"] if self.waiting else []
        return [*first, *(f"{one} had ended before: {state}" for one, state in self.ended.items()), *last]


def act(context: Context, verb: str, selectors: Sequence[str], cluster: str | None = None) -> Acted:
    """Cancel, requeue, hold or release every run or array task named.

    All names are resolved before anything is changed. What is known to be over is cancelled all the same:
    Slurm may have queued it again by itself.

    Raises:
        JobNotFound, RequestInvalid: a name matches nothing, or has no job yet; nothing was changed.
        JobNotFound: a job of that number is not the run's; nothing was changed on its cluster.
        SlurmError: the scheduler refused all or a part of it; its words are the evidence.
    """
    chosen: dict[tuple[str, str, str, bool], list[tuple[str, JobRecord]]] = defaultdict(list)
    for selector in selectors:
        record = _find_for(context, verb, selector, cluster)
        if record.job_id is None:
            raise RequestInvalid(
                [f"{selector}: it is not known whether this run has a job; see dtslurm status"]
            )
        target = selector if array_of_task(selector) == record.job_id else record.job_id
        if verb == "requeue":
            _refuse_without_secrets(target, record)
        chosen[record.route].append((target, record))
    acted = Acted([], {}, [])
    for pairs in chosen.values():
        place = context.cluster_of(pairs[0][1])
        with invalidating_cache(context, place):
            partly = _change(context, place, verb, pairs)
        for target, record in pairs:
            if partly is not None and target not in partly.done:
                continue
            end = _known_end(target, record) if verb == "cancel" else ""
            if end:
                acted.ended[target] = end
            else:
                _note(context, verb, target, record)
                acted.done.append(target)
        if partly is not None:
            acted.waiting.extend(partly.waiting)
            _tell_refused(verb, partly, pairs)
    return acted


def _find_for(context: Context, verb: str, selector: str, cluster: str | None) -> JobRecord:
    """Return the run that a word means; to cancel it, it is enough that the queue lists its job.

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
    if record.array is None and _known_end(target, record) and SECRETS_DELETED in _script_lines(record):
        raise RequestInvalid(
            [f"{target}: the supervisor deleted the run's secrets when the run ended"],
            hint=f"dtslurm resubmit {target} --from-checkpoint submits the run again with the secrets",
        )


def _tell_refused(verb: str, partly: PartialResult, pairs: Sequence[tuple[str, JobRecord]]) -> None:
    """Tell of what was refused, once the rest is noted.

    Raises:
        SlurmError: there is such a thing.
    """
    if partly.refused:
        waiting = [f"already waiting: {', '.join(partly.waiting)}"] if partly.waiting else []
        error = SlurmError(
            f"{verb}: Slurm refused a part of it; the rest is done",
            evidence=[*partly.refused, *waiting, f"{DONE[verb]}: {', '.join(partly.done)}"],
        )
        if verb == "requeue":
            _explain_no_requeue(error, pairs)
        raise error


def _known_end(target: str, record: JobRecord) -> str:
    """Return how a run or an array task ended as far as that is known, else an empty word."""
    ends = JobTable(record.final).covering(target)
    return ", ".join(sorted({end.state.name for end in ends if end.terminal}))


def _change(
    context: Context, place: ActiveCluster, verb: str, pairs: Sequence[tuple[str, JobRecord]]
) -> PartialResult | None:
    """Do it on one cluster, once what it shows of the jobs was looked at; tell where it was not all."""

    def mark() -> None:
        for target, record in pairs:
            _mark(context, verb, target, record)

    def look(listed: Mapping[str, Sequence[JobStatus]]) -> None:
        _refuse_others(pairs, listed)
        mark()

    try:
        return _call(place.scheduler, verb, [target for target, _ in pairs], look)
    except SlurmUnavailable:
        if verb == "cancel":  # the job may hear of it by itself
            mark()
        raise
    except JobNotFound as error:
        if verb == "requeue" and not error.hint:
            again = _resubmit_command(pairs)
            error.hint = f"Slurm forgets jobs some minutes after their end; {again} queues it anew"
        raise
    except SlurmError as error:
        if verb == "requeue":
            _explain_no_requeue(error, pairs)
        raise


def _explain_no_requeue(error: SlurmError, pairs: Sequence[tuple[str, JobRecord]]) -> None:
    """Add to a refusal which jobs may not be requeued by their scripts, and how to run them again."""
    names = [target for target, record in pairs if _forbids_requeue(record)]
    if not names:
        return
    why = "the default for a run that would not go on from its checkpoints"
    error.evidence = (*error.evidence, f"{', '.join(names)}: submitted with --no-requeue, {why}")
    job = pairs[0][0] if len(pairs) == 1 else "JOB"
    error.hint = (
        f"dtslurm cancel {job} ends it if it still runs, and {_resubmit_command(pairs)} submits it again; "
        "only runs that are submitted with --requeue can be requeued"
    )


def _forbids_requeue(record: JobRecord) -> bool:
    return NO_REQUEUE in _script_lines(record)


def _script_lines(record: JobRecord) -> list[str]:
    try:
        return (Path(record.folder) / RunDir.SCRIPT).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _resubmit_command(pairs: Sequence[tuple[str, JobRecord]]) -> str:
    """Return the command that runs a single run once more; of several runs its general form."""
    record = pairs[0][1]
    job = record.job_id if len(pairs) == 1 else "JOB"
    return f"dtslurm {'sweep resume' if record.sweep else 'resubmit'} {job}"


def _refuse_others(pairs: Sequence[tuple[str, JobRecord]], listed: Mapping[str, Sequence[JobStatus]]) -> None:
    """Refuse to change a job that is not the run's; what Slurm shows nothing of cannot be told.

    Raises:
        JobNotFound: there is one.
    """
    for target, record in pairs:
        seen = listed.get(target, ())
        if seen and not any(belongs_to_run(record, status) for status in seen):
            raise JobNotFound(
                f"{describe_reused_id(record)}; nothing was changed on {record.cluster}",
                evidence=[*map(describe_job, seen[:3]), f"the run is {record.name}, {record.comment}"],
                hint=f"dtslurm status {record.job_id} tells what is known of the run",
            )


def _call(scheduler: Scheduler, verb: str, ids: Sequence[str], look: Look) -> PartialResult | None:
    calls: dict[str, Callable[[Sequence[str], Look], PartialResult | None]] = {
        "cancel": scheduler.cancel,
        "requeue": scheduler.requeue,
        "hold": scheduler.hold,
        "release": scheduler.release,
    }
    return calls[verb](ids, look)


def _mark(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Leave word for the job before it ends: a cancelled run must not start again by itself.

    Raises:
        RequestInvalid: a run is to be requeued whose files were removed.
    """
    if verb not in {"cancel", "requeue"} or record.phase == UNRECORDED:  # its folder may be gone or another's
        return
    task = target.partition("_")[2]
    folder = f"{record.run_dir}/tasks/{task}" if task else record.run_dir
    if verb == "requeue":
        _allow_start(context, target, record, folder)
        return
    with contextlib.suppress(DtslurmError):  # the scheduler's word is what counts
        context.cluster_of(record).transport.put(b"cancelled by dtslurm\n", f"{folder}/stop")


def _allow_start(context: Context, target: str, record: JobRecord, folder: str) -> None:
    """Remove what keeps the job of a run from starting again.

    Raises:
        RequestInvalid: the run's files were removed.
    """
    argv = ["sh", "-c", _ALLOW_START, "sh", record.run_dir, folder, reclaim.CLEANED.decode().strip()]
    try:
        code = context.cluster_of(record).transport.run(argv).code
    except DtslurmError:
        return  # the scheduler's word is what counts
    if code in _REFUSALS:
        raise RequestInvalid(
            [f"{target}: {_REFUSALS[code].format(record.run_dir)}"],
            hint=f"{_resubmit_command([(target, record)])} submits it again, with its code",
        )


def _note(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Record the act in the run; a requeued run has no end any more."""
    if record.phase == UNRECORDED:
        return
    append_event(context, record, verb, job_id=target)
    if verb == "requeue" and record.final:
        save(context, replace(record, final=()))
