"""Change what queued jobs do: cancel, requeue, hold, release."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.model.record import JobRecord
from dtslurm.scheduler.base import Scheduler
from dtslurm.services.context import Context
from dtslurm.services.monitor import changing
from dtslurm.services.records import append_event, save
from dtslurm.services.runs import find


def act(context: Context, verb: str, selectors: Sequence[str], cluster: str | None = None) -> list[str]:
    """Cancel, requeue, hold or release every run or array task named; return the job ids acted on.

    All names are resolved before anything is changed.

    Raises:
        JobNotFound, RequestInvalid: a name matches nothing, or has no job yet; nothing was changed.
        SlurmError: the scheduler refused; its words are the evidence.
    """
    chosen: dict[str, list[tuple[str, JobRecord]]] = defaultdict(list)
    for selector in selectors:
        record = find(context, selector, cluster)
        if record.job_id is None:
            raise RequestInvalid(
                [f"{selector}: it is not known whether this run has a job; see dtslurm status"]
            )
        target = selector if selector.startswith(f"{record.job_id}_") else record.job_id
        chosen[f"{record.profile}\n{record.transport}"].append((target, record))
    done = []
    for pairs in chosen.values():
        ids = [target for target, _ in pairs]
        for target, record in pairs:
            _mark(context, verb, target, record)
        place = context.cluster_of(pairs[0][1])
        with changing(context, place):
            _call(place.scheduler, verb, ids)
        for target, record in pairs:
            _note(context, verb, target, record)
        done += ids
    return done


def _call(scheduler: Scheduler, verb: str, ids: Sequence[str]) -> None:
    calls = {
        "cancel": scheduler.cancel,
        "requeue": scheduler.requeue,
        "hold": scheduler.hold,
        "release": scheduler.release,
    }
    calls[verb](ids)


def _mark(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Leave word for the job before it ends: a cancelled run must not start again by itself."""
    if verb not in {"cancel", "requeue"}:
        return
    task = target.partition("_")[2]
    stop = f"{record.run_dir}/tasks/{task}/stop" if task else f"{record.run_dir}/stop"
    with contextlib.suppress(DtslurmError):  # the scheduler's word is what counts
        transport = context.cluster_of(record).transport
        if verb == "cancel":
            transport.put(b"cancelled by dtslurm\n", stop)
        else:
            transport.run(["rm", "-f", "--", stop, *([f"{record.run_dir}/stop"] if task else [])])


def _note(context: Context, verb: str, target: str, record: JobRecord) -> None:
    """Record the act in the run; a requeued run has no end any more."""
    append_event(context, record, verb, job_id=target)
    if verb == "requeue" and record.final:
        save(context, replace(record, final=()))
