"""Write the records, the index entries and the events of runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.shell import join
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.index import Index, note_missing, state_folder
from dtslurm.store.rundir import RunDir, is_run_name
from dtslurm.transport.base import Transport
from dtslurm.transport.deletion import remove

if TYPE_CHECKING:
    from dtslurm.model.jobs.job import Submission
    from dtslurm.services.submit.prepare import Prepared

# If sbatch's answer was lost, its job appears in the queue once the controller responds. For a record that is
# still "planned", sbatch may still be running: it retries a busy controller for up to two minutes.
_JOB_MAY_APPEAR_S = {"unknown": 60.0, "planned": 60.0 + SUBMIT_TIMEOUT_S}


# $1 is the run root, $2 the name of a run directory in it; a symbolic link of that name is not removed.
_REMOVE = 'cd -P -- "$1" && [ ! -L "./$2" ] && rm -rf -- "./$2"'


def looked_for_until(record: JobRecord) -> float:
    """Return until when the job of a submission with a lost answer may appear, seconds since the epoch."""
    return record.created_at + _JOB_MAY_APPEAR_S.get(record.phase, 0.0)


def settle(
    context: Context, cluster: ActiveCluster, record: JobRecord, *, abandoned: bool = False
) -> JobRecord:
    """Find out whether a submission whose answer from sbatch was lost has a job; return the updated record.

    If the scheduler knows no such job one minute after sbatch gave up, the run is marked as withdrawn by its
    claim link. If Slurm serves the lost request later, the job finds the claim taken and ends without work.

    Args:
        abandoned: the submitting process is known to be dead, so that the minute is not waited for.

    Raises:
        SlurmUnavailable: the scheduler does not answer, so the record stays unsettled.
        TransportError, StoreError: the run's claim cannot be read.
    """
    if record.phase not in {"planned", "unknown"}:
        return record
    phase = "submitted"
    job_id = cluster.scheduler.find(record.comment)
    is_overdue = abandoned or context.clock() > looked_for_until(record)
    if job_id is None and is_overdue:
        job_id = _withdraw_unless_claimed(cluster.transport, record.run_dir)
        phase = "submitted" if job_id else "withdrawn"
    elif job_id is None:
        return record
    updated_record = replace(record, phase=phase, job_id=job_id)
    save(context, updated_record)
    append_event(context, updated_record, phase, job_id=job_id, cluster=cluster.name)
    return updated_record


def _withdraw_unless_claimed(transport: Transport, run_dir: str) -> str | None:
    """Mark a run as withdrawn unless a job claimed it; return that job's id, None if the run is withdrawn."""
    script = '[ -d "$1" ] || exec echo withdrawn; ln -s withdrawn "$1"/claim 2>/dev/null; readlink "$1"/claim'
    answer = transport.run(["sh", "-c", script, "sh", run_dir])
    match = re.fullmatch(r"withdrawn|job-(\d+(?:\.\d+)?)", answer.stdout.strip())
    if match is None:
        raise StoreError(f"cannot claim the run {run_dir}", evidence=answer.stderr.splitlines())
    return match[1]


def mirrors(context: Context) -> Path:
    """Return the local folder that holds the copies of all remote runs."""
    return state_folder(context.env) / "remote"


def mirror_of(context: Context, cluster: ActiveCluster, submission: Submission) -> Path:
    """Return the local folder for the copies of a remote run's files."""
    cluster_folder = re.sub(r"[^\w.-]", "-", cluster.name)
    return mirrors(context) / cluster_folder / PurePosixPath(submission.run_dir).name


def planned_record(context: Context, prepared: Prepared) -> JobRecord:
    """Return the record of a submission before its job is queued."""
    from dtslurm.render.script import training_command  # imported late: only submissions need templates

    submission, cluster = prepared.submission, prepared.cluster
    spec, layout = submission.spec, submission.layout
    return JobRecord(
        token=submission.token,
        script_hash=submission.script_hash,
        cluster=submission.cluster,
        name=spec.name,
        run_dir=submission.run_dir,
        mirror=str(mirror_of(context, cluster, submission)) if cluster.remote else "",
        phase="planned",
        created_at=context.clock(),
        profile=str(cluster.path),
        transport=prepared.transport,
        array=spec.array,
        world_size=layout.world_size,
        ranks_per_node=layout.ranks_per_node,
        launcher=spec.launcher,
        script=spec.script,
        command=join(training_command(spec)) if spec.idle_limit is None else "",
        work_dir=spec.work_dir,
        time_limit=layout.time.seconds if layout.time else None,
        parent=prepared.parent,
        stage=prepared.stage,
        stages=prepared.stages,
        sweep=prepared.sweep,
        holds_allocation=spec.idle_limit is not None,
    )


def save(context: Context, record: JobRecord) -> None:
    """Write a run's local record, and its row in the index."""
    with noting(context, record):
        RunDir(Path(record.folder)).update(context.transport, record)


@contextlib.contextmanager
def noting(context: Context, record: JobRecord) -> Iterator[None]:
    """Write the record to the index in a thread, so that one journal commit covers the body's writes too."""
    thread = threading.Thread(target=remember, args=(context.index, record))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def remember(index: Index, record: JobRecord) -> None:
    """Write the record to the index.

    A full or read-only home must not stop a run: if the index cannot be written, the run root gets a note,
    and a later command inserts the run into the index.
    """
    try:
        index.put(record)
    except StoreError:
        stored = False
    else:
        stored = index.permanent
    if not stored and not record.mirror:
        note_missing(Path(record.run_dir))


def forget(context: Context, cluster: ActiveCluster, record: JobRecord, *, placed: bool) -> None:
    """Remove a run that was never queued; its remote run directory only if ``placed``."""
    root, name = str(PurePosixPath(record.run_dir).parent), PurePosixPath(record.run_dir).name
    if not is_run_name(name):
        raise StoreError(
            f"{record.run_dir} does not have the name of a run directory, so dtslurm does not delete it"
        )
    with contextlib.suppress(OSError):
        remove(Path(record.folder), within=mirrors(context) if cluster.remote else Path(root))
    if cluster.remote and placed:
        with contextlib.suppress(DtslurmError):  # `dtslurm clean` removes the folder later
            cluster.transport.run(["sh", "-c", _REMOVE, "sh", root, name])
    with contextlib.suppress(StoreError):
        context.index.remove(record.token)


def append_event(context: Context, record: JobRecord, event: str, **values: object) -> None:
    """Append an event to the run's ``events.jsonl`` in one write, so that concurrent lines stay intact."""
    line = json.dumps({"time": int(context.clock()), "event": event, **values})
    if record.mirror:
        script = 'umask 077; printf "%s\\n" "$2" >>"$1"/events.jsonl'
        with contextlib.suppress(DtslurmError):
            context.cluster_of(record).transport.run(["sh", "-c", script, "sh", record.run_dir, line])
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with contextlib.suppress(OSError):  # a full disk must not turn a completed action into a failure
        descriptor = os.open(Path(record.run_dir) / "events.jsonl", flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{line}\n".encode())
