"""Which runs there are, and which of them a word means."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dtslurm.errors import DtslurmError, JobNotFound, RequestInvalid, StoreError
from dtslurm.model.paths import expanded
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.records import mirrors
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import array_of_task
from dtslurm.store.rundir import RunDir


def find(context: Context, selector: str | None, cluster: str | None = None) -> JobRecord:
    """Return the one run that ``selector`` names: a job id, array task, token, run name or run directory.

    None means the newest run.

    Raises:
        JobNotFound: none matches, or its run directory is gone or was moved.
        StoreError: its record cannot be read.
        RequestInvalid: runs on several clusters match.
    """
    if selector is None:
        return _newest(context, cluster)
    path = expanded(selector)
    if "/" in selector and (path / "job.json").is_file():
        return _onward(_in_its_place(context, path, RunDir(path).load()))
    index = context.index
    known = index.find(selector, cluster) or index.of_job(array_of_task(selector), cluster)
    runs = list(_existing(known))
    if not runs and known:
        _refuse_lost(context, selector, known[0])
    if not runs:
        raise JobNotFound(
            f"no run {selector!r} is known here",
            hint="dtslurm status lists the known runs; a run directory's path works too",
        )
    clusters = sorted({record.cluster for record in runs})
    if len(clusters) > 1:
        raise RequestInvalid(
            [f"{selector} is a run on several clusters: {', '.join(clusters)}"], hint="say which by --cluster"
        )
    return runs[0]


def words_for(context: Context, record: JobRecord) -> str:
    """Return what names a run in a command: its job id, and the cluster where another has that id too."""
    job = record.job_id or record.token
    try:
        elsewhere = set(context.index.find(job)) - set(context.index.find(job, record.cluster))
    except StoreError:
        elsewhere = set()
    return f"{job} --cluster {shlex.quote(record.cluster)}" if elsewhere else job


def words_for_all(context: Context, records: Iterable[JobRecord]) -> str:
    """Return what names several runs of one cluster in one command."""
    names = [words_for(context, record) for record in records]
    where = next((name[name.index(" ") :] for name in names if " " in name), "")
    return " ".join(name.split()[0] for name in names) + where


def describe_queued(context: Context, records: Sequence[JobRecord]) -> str:
    """Return in words that runs were submitted, and the command that cancels their jobs."""
    names = words_for_all(context, records)
    jobs = ", ".join(f"{record.job_id} ({record.name})" for record in records)
    if len(records) == 1:
        return (
            f"job {jobs} was submitted to {records[0].cluster} and stays in the queue; "
            f"dtslurm cancel {names} cancels it"
        )
    return (
        f"jobs {jobs} were submitted to {records[0].cluster} and stay in the queue; "
        f"dtslurm cancel {names} cancels them"
    )


def _newest(context: Context, cluster: str | None) -> JobRecord:
    runs = recent(context, 1, cluster)
    if not runs:
        where = f" on {cluster}" if cluster else ""
        raise JobNotFound(f"no run{where} is known here yet", hint="dtslurm submit makes one")
    return runs[0]


def recent(context: Context, limit: int, cluster: str | None = None) -> list[JobRecord]:
    """Return the newest runs whose directories are still there, newest first.

    Raises:
        ProfileNotFound: there are none on ``cluster``, and no such cluster either.
    """
    runs = list(islice(_existing(context.index.run_dirs(limit=None, cluster=cluster)), limit))
    if cluster is not None and not runs:
        context.cluster(cluster)
    return runs


def every(context: Context, cluster: str | None = None) -> list[JobRecord]:
    """Return all runs whose directories are still there, newest first.

    Raises:
        ProfileNotFound: as `recent`.
    """
    return recent(context, sys.maxsize, cluster)


def _existing(paths: Iterable[Path]) -> Iterator[JobRecord]:
    """Yield the records of run directories that are still there."""
    for path in paths:
        try:
            yield _onward(RunDir(path).load())
        except StoreError:
            continue


def _in_its_place(context: Context, path: Path, record: JobRecord) -> JobRecord:
    """Return a record that was read in a folder; refuse one whose folder is another, as its job writes there.

    Raises:
        JobNotFound: the folder was moved or copied.
    """
    home = Path(record.folder)
    if record.mirror and mirrors(context).resolve() not in home.resolve().parents:
        raise JobNotFound(f"{path} is no run of this machine: its record names {home} as the place of copies")
    if _there(home) and path.samefile(home):
        return record
    if _there(home):
        raise JobNotFound(f"{path} is a copy of the run in {home}", hint=f"name the run by {home}")
    raise JobNotFound(
        f"{path} was moved: job {record.job_id or '?'} has its run directory in {home}",
        hint=f"ln -s {shlex.quote(str(path.absolute()))} {shlex.quote(str(home))} lets both be found",
    )


def _there(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _refuse_lost(context: Context, selector: str, path: Path) -> None:
    """Refuse a run that the index knows, and whose record cannot be read.

    Raises:
        JobNotFound: its run directory is gone.
        StoreError: its record is damaged.
    """
    run = RunDir(path)
    if run.record_path.exists():
        run.load()
        return
    gone = (
        f"the record in its run directory, {run.record_path},"
        if path.exists()
        else f"its run directory {path}"
    )
    cluster, job_id = context.index.job_in(path)
    raise JobNotFound(
        f"{selector} is known here, but {gone} is gone",
        hint=_way_to_end(context, cluster, job_id) if job_id else "",
    )


def _way_to_end(context: Context, cluster: str, job_id: str) -> str:
    """Return the command that ends a job of which no more is known."""
    try:
        context.cluster(cluster)
    except DtslurmError:  # its profile is gone
        return f"scancel {job_id} on {cluster} ends its job if it still runs"
    return f"dtslurm cancel {job_id} --cluster {shlex.quote(cluster)} ends its job if it still runs"


def _onward(record: JobRecord) -> JobRecord:
    """Return the record with the job that goes on for its first one: who holds the run's claim now."""
    try:
        found = re.fullmatch(r"job-(\d+)", str((Path(record.folder) / "claim").readlink()))
    except OSError:
        return record
    if found is None or record.job_id in {None, found[1]}:
        return record
    return replace(record, job_id=found[1], final=())
