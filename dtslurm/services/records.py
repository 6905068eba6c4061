"""Change what is remembered of runs: the record, the index, the events."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.job import JobRecord
from dtslurm.services.context import Cluster, Context
from dtslurm.store.index import Index
from dtslurm.store.rundir import RunDir


def settle(context: Context, cluster: Cluster, record: JobRecord) -> JobRecord:
    """Return the record of a submission whose answer was lost, settled by a look-up of its token."""
    if record.phase not in {"planned", "unknown"}:
        return record
    job_id = cluster.scheduler.find(record.token)
    if job_id is None:
        return record
    settled = replace(record, phase="submitted", job_id=job_id)
    run = RunDir(Path(record.run_dir))
    save(context, run, settled)
    append_event(run, context.clock(), "submitted", job_id=job_id, cluster=cluster.name)
    return settled


def save(context: Context, run: RunDir, record: JobRecord) -> None:
    """Write a run's record and its row in the index."""
    run.update(context.transport, record)
    remember(context.index, record)


def remember(index: Index, record: JobRecord) -> None:
    """Put the record in the index, a mere convenience: a full or read-only home does not stop a run."""
    try:
        index.put(record)
    except StoreError:
        return


def forget(context: Context, run: RunDir, record: JobRecord) -> None:
    """Remove a run that was never queued."""
    shutil.rmtree(run.path, ignore_errors=True)
    try:
        context.index.remove(record.token)
    except StoreError:
        return


def append_event(run: RunDir, time: float, event: str, **values: object) -> None:
    """Append one event to ``events.jsonl``; one write, so that lines of others stay whole."""
    line = json.dumps({"time": int(time), "event": event, **values}) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        descriptor = os.open(run.path / "events.jsonl", flags, 0o600)
    except OSError:
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(line.encode())
