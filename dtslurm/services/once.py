"""Whoever submits under a key that was used before gets the first one's job."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtslurm.errors import RunExists, StoreError, SubmitUnknown
from dtslurm.model.job import JobRecord
from dtslurm.services.context import Cluster, Context
from dtslurm.services.prepare import Prepared
from dtslurm.services.records import mirror_of, save, settle
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir

_PATIENCE_S = 160.0  # longer than sbatch may take
_LOOK_S = 0.5

# Argument 1 is the run directory: print its record and its events.
_SHOW = (
    'cat "$1"/job.json; printf "\\0"; cat "$1"/events.jsonl 2>/dev/null; printf "\\0"; readlink "$1"/claim'
)


def first_of(context: Context, prepared: Prepared) -> JobRecord | None:
    """Return the record of the run that was first, once it has a job.

    None: no job came of it and none can any more; it was moved aside, so that there is room for another.

    Raises:
        SubmitUnknown: it has none in reasonable time; there may be one later.
        StoreError: its record cannot be read.
    """
    submission, cluster = prepared.submission, prepared.cluster
    give_up = context.clock() + _PATIENCE_S
    while context.clock() < give_up:
        record = _known(cluster, submission.run_dir) or _mirrored(context, prepared)
        if record is not None and record.job_id is None:
            record = settle(context, cluster, record)
        if record is not None and record.phase == "withdrawn":
            _move_aside(cluster, record)
            return None
        if record is not None and record.job_id is not None:
            return _adopted(context, prepared, record)
        context.sleep(_LOOK_S)
    raise SubmitUnknown(
        "a submission under the same key is under way, and has no job yet",
        evidence=[f"its run directory is {submission.run_dir}"],
        hint="dtslurm status finds out what became of it",
    )


def _adopted(context: Context, prepared: Prepared, record: JobRecord) -> JobRecord:
    """Make the run known here, too: whoever was first may not have lived to do so."""
    cluster, transport = prepared.cluster, context.transport
    if cluster.remote:
        mirror = mirror_of(context, cluster, prepared.submission)
        record = replace(record, mirror=str(mirror), transport=prepared.transport)
        with contextlib.suppress(RunExists):
            document = codec.encode({"schema": codec.SCHEMA, **codec.plain(record)})
            RunDir(mirror).create(transport, {RunDir.RECORD: document})
    save(context, record)
    return record


def _mirrored(context: Context, prepared: Prepared) -> JobRecord | None:
    """Return what this machine knows of a submission that has not reached the cluster (yet)."""
    try:
        return RunDir(mirror_of(context, prepared.cluster, prepared.submission)).load()
    except StoreError:
        return None


def _known(cluster: Cluster, run_dir: str) -> JobRecord | None:
    """Return what the run directory tells: its record, and the job that its events or its claim name."""
    answer = cluster.transport.run(["sh", "-c", _SHOW, "sh", run_dir])
    document, _, rest = answer.stdout.partition("\0")
    if not document:
        return None
    record = codec.record_from(codec.decode(document.encode(), run_dir), run_dir)
    events, _, claim = rest.partition("\0")
    if claim.strip() == "withdrawn":
        return replace(record, phase="withdrawn")
    told = [event for event in map(_event, events.splitlines()) if event.get("event") == "submitted"]
    job_id = told[-1].get("job_id") if told else claim.strip().removeprefix("job-") or None
    return replace(record, phase="submitted", job_id=str(job_id)) if job_id and not record.job_id else record


def _event(line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _move_aside(cluster: Cluster, record: JobRecord) -> None:
    """Make room for another run in the same place."""
    script = '[ ! -e "$1" ] || mv -- "$1" "$1.withdrawn-$(date +%s)"'
    answer = cluster.transport.run(["sh", "-c", script, "sh", record.run_dir])
    if not answer.ok:
        raise StoreError(f"cannot move {record.run_dir} aside", evidence=answer.stderr.splitlines())
    if record.mirror:
        shutil.rmtree(record.mirror, ignore_errors=True)
