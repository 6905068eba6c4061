"""Change what is remembered of runs: the record, the index, the events."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.record import JobRecord
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S
from dtslurm.services.context import Cluster, Context
from dtslurm.store.index import Index, state_folder
from dtslurm.store.rundir import RunDir
from dtslurm.transport.base import Transport

if TYPE_CHECKING:
    from dtslurm.model.job import Submission

# A job whose answer was lost shows up in the queue once the controller is awake. The client of one that is
# only planned may still wait: sbatch asks a busy controller again for up to two minutes.
_MAY_STILL_COME_S = {"unknown": 60.0, "planned": 60.0 + SUBMIT_TIMEOUT_S}


def looked_for_until(record: JobRecord) -> float:
    """Return until when a job may still come of a submission whose answer was lost."""
    return record.created_at + _MAY_STILL_COME_S.get(record.phase, 0.0)


def settle(context: Context, cluster: Cluster, record: JobRecord, *, abandoned: bool = False) -> JobRecord:
    """Return the record of a submission whose answer was lost, settled by a look-up of its job.

    Where the scheduler answers and knows none for a minute after its client gave up, the run is claimed for
    nobody: should the lost request be served after all, its job finds the claim taken and ends without work.

    Args:
        abandoned: who submitted it is known to be gone, so that nothing need be waited for.

    Raises:
        SlurmUnavailable: the scheduler does not answer, so nothing is settled.
        TransportError, StoreError: the run's claim cannot be looked at.
    """
    if record.phase not in {"planned", "unknown"}:
        return record
    phase = "submitted"
    job_id = cluster.scheduler.find(record.comment)
    late = abandoned or context.clock() > looked_for_until(record)
    if job_id is None and late:
        job_id = _owner(cluster.transport, record.run_dir)
        phase = "submitted" if job_id else "withdrawn"
    elif job_id is None:
        return record
    settled = replace(record, phase=phase, job_id=job_id)
    save(context, settled)
    append_event(context, settled, phase, job_id=job_id, cluster=cluster.name)
    return settled


def _owner(transport: Transport, run_dir: str) -> str | None:
    """Claim a run for nobody; return the job that claimed it before, None if the claim is ours."""
    script = '[ -d "$1" ] || exec echo withdrawn; ln -s withdrawn "$1"/claim 2>/dev/null; readlink "$1"/claim'
    answer = transport.run(["sh", "-c", script, "sh", run_dir])
    found = re.fullmatch(r"withdrawn|job-(\d+)", answer.stdout.strip())
    if found is None:
        raise StoreError(f"cannot claim the run {run_dir}", evidence=answer.stderr.splitlines())
    return found[1]


def mirror_of(context: Context, cluster: Cluster, submission: Submission) -> Path:
    """Return where this machine keeps copies of a far run's files."""
    place = re.sub(r"[^\w.-]", "-", cluster.name)
    return state_folder(context.env) / "remote" / place / PurePosixPath(submission.run_dir).name


def save(context: Context, record: JobRecord) -> None:
    """Write a run's record on this machine, and its row in the index."""
    with noting(context, record):
        RunDir(Path(record.folder)).update(context.transport, record)


@contextlib.contextmanager
def noting(context: Context, record: JobRecord) -> Iterator[None]:
    """Put the record in the index while something else is written: a journal commits both at once."""
    thread = threading.Thread(target=remember, args=(context.index, record))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def remember(index: Index, record: JobRecord) -> None:
    """Put the record in the index, a mere convenience: a full or read-only home does not stop a run."""
    try:
        index.put(record)
    except StoreError:
        return


def forget(context: Context, cluster: Cluster, record: JobRecord, *, placed: bool) -> None:
    """Remove a run that was never queued; on a cluster that is far, if it was put in its place there."""
    shutil.rmtree(record.folder, ignore_errors=True)
    if cluster.remote and placed:
        with contextlib.suppress(DtslurmError):  # it cannot be reached: `dtslurm clean` finds the rest
            cluster.transport.run(["rm", "-rf", "--", record.run_dir])
    with contextlib.suppress(StoreError):
        context.index.remove(record.token)


def append_event(context: Context, record: JobRecord, event: str, **values: object) -> None:
    """Append one event to the run's ``events.jsonl``; one write, so that lines of others stay whole."""
    line = json.dumps({"time": int(context.clock()), "event": event, **values})
    if record.mirror:
        script = 'umask 077; printf "%s\\n" "$2" >>"$1"/events.jsonl'
        with contextlib.suppress(DtslurmError):
            context.cluster_of(record).transport.run(["sh", "-c", script, "sh", record.run_dir, line])
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with contextlib.suppress(OSError):  # a full disk must not make a failure of what was done
        descriptor = os.open(Path(record.run_dir) / "events.jsonl", flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{line}\n".encode())
