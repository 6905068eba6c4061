"""Change what is remembered of runs: the record, the index, the events."""

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
from dtslurm.store.index import Index, state_folder
from dtslurm.store.rundir import RunDir, is_run_name
from dtslurm.transport.base import Transport
from dtslurm.transport.deletion import remove

if TYPE_CHECKING:
    from dtslurm.model.jobs.job import Submission
    from dtslurm.services.submit.prepare import Prepared

# A job whose answer was lost shows up in the queue once the controller is awake. The client of one that is
# only planned may still wait: sbatch asks a busy controller again for up to two minutes.
_MAY_STILL_COME_S = {"unknown": 60.0, "planned": 60.0 + SUBMIT_TIMEOUT_S}


# Argument 1 is the run root, argument 2 the name of a run in it; a link in its place is left alone.
_REMOVE = 'cd -P -- "$1" && [ ! -L "./$2" ] && rm -rf -- "./$2"'


def looked_for_until(record: JobRecord) -> float:
    """Return until when a job may still come of a submission whose answer was lost."""
    return record.created_at + _MAY_STILL_COME_S.get(record.phase, 0.0)


def settle(
    context: Context, cluster: ActiveCluster, record: JobRecord, *, abandoned: bool = False
) -> JobRecord:
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


def mirrors(context: Context) -> Path:
    """Return the folder of all copies of runs on other machines."""
    return state_folder(context.env) / "remote"


def mirror_of(context: Context, cluster: ActiveCluster, submission: Submission) -> Path:
    """Return where this machine keeps copies of a far run's files."""
    place = re.sub(r"[^\w.-]", "-", cluster.name)
    return mirrors(context) / place / PurePosixPath(submission.run_dir).name


def planned_record(context: Context, prepared: Prepared) -> JobRecord:
    """Return the record of a submission that was not queued yet."""
    from dtslurm.render.script import training_command  # a status needs no templates

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
        command=join(training_command(spec)),
        work_dir=spec.work_dir,
        time_limit=layout.time.seconds if layout.time else None,
        parent=prepared.parent,
        stage=prepared.stage,
        stages=prepared.stages,
        sweep=prepared.sweep,
    )


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


def forget(context: Context, cluster: ActiveCluster, record: JobRecord, *, placed: bool) -> None:
    """Remove a run that was never queued; on a cluster that is far, if it was put in its place there."""
    root, name = str(PurePosixPath(record.run_dir).parent), PurePosixPath(record.run_dir).name
    if not is_run_name(name):
        raise StoreError(f"{record.run_dir} is not named like a run of dtslurm: it is not removed")
    with contextlib.suppress(OSError):
        remove(Path(record.folder), within=mirrors(context) if cluster.remote else Path(root))
    if cluster.remote and placed:
        with contextlib.suppress(DtslurmError):  # it cannot be reached: `dtslurm clean` finds the rest
            cluster.transport.run(["sh", "-c", _REMOVE, "sh", root, name])
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
