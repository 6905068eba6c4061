"""Find runs by selector, and list the known runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dtslurm.errors import DtslurmError, JobNotFound, RequestInvalid, StoreError
from dtslurm.model.paths import expand_home
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.records import mirrors
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import array_of_task
from dtslurm.store.rundir import RunDir


def find(context: Context, selector: str | None, cluster: str | None = None) -> JobRecord:
    """Return the run that ``selector`` names: a job id, array task, token, run name or run directory.

    None selects the newest run.

    Raises:
        JobNotFound: no run matches, or its run directory is gone or was moved.
        StoreError: its record cannot be read.
        RequestInvalid: runs on several clusters match.
    """
    if selector is None:
        return _find_newest(context, cluster)
    path = expand_home(selector)
    if "/" in selector and (path / "job.json").is_file():
        return _with_claiming_job(_check_folder(context, path, RunDir(path).load()))
    index = context.index
    run_dirs = index.find(selector, cluster) or index.of_job(array_of_task(selector), cluster)
    runs = list(_load_readable(run_dirs))
    if not runs and run_dirs:
        _refuse_unreadable(context, selector, run_dirs[0])
    if not runs:
        raise JobNotFound(
            f"no run {selector!r} is known on this machine",
            hint="dtslurm status lists the known runs; you can also give the path of a run directory",
        )
    clusters = sorted({record.cluster for record in runs})
    if len(clusters) > 1:
        raise RequestInvalid(
            [f"{selector} is a run on several clusters: {', '.join(clusters)}"],
            hint="select a cluster with --cluster",
        )
    return runs[0]


def selector_arguments(context: Context, record: JobRecord) -> str:
    """Return the arguments that select a run: its job id, and --cluster if several clusters have that id."""
    job = record.job_id or record.token
    try:
        elsewhere = set(context.index.find(job)) - set(context.index.find(job, record.cluster))
    except StoreError:
        elsewhere = set()
    return f"{job} --cluster {shlex.quote(record.cluster)}" if elsewhere else job


def words_for_all(context: Context, records: Iterable[JobRecord]) -> str:
    """Return the arguments that select several runs of one cluster."""
    names = [selector_arguments(context, record) for record in records]
    cluster_option = next((name[name.index(" ") :] for name in names if " " in name), "")
    return " ".join(name.split()[0] for name in names) + cluster_option


def describe_queued(context: Context, records: Sequence[JobRecord]) -> str:
    """Describe which runs were submitted, with the command that cancels their jobs."""
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


def _find_newest(context: Context, cluster: str | None) -> JobRecord:
    runs = recent(context, 1, cluster)
    if not runs:
        cluster_text = f" on {cluster}" if cluster else ""
        raise JobNotFound(f"this machine has no run{cluster_text} yet", hint="dtslurm submit starts a run")
    return runs[0]


def recent(context: Context, limit: int, cluster: str | None = None) -> list[JobRecord]:
    """Return the newest runs with a readable record, newest first.

    Raises:
        ProfileNotFound: ``cluster`` has no run and no profile.
    """
    runs = list(islice(_load_readable(context.index.run_dirs(limit=None, cluster=cluster)), limit))
    if cluster is not None and not runs:
        context.cluster(cluster)
    return runs


def every(context: Context, cluster: str | None = None) -> list[JobRecord]:
    """Return all runs with a readable record, newest first.

    Raises:
        ProfileNotFound: as `recent`.
    """
    return recent(context, sys.maxsize, cluster)


def _load_readable(paths: Iterable[Path]) -> Iterator[JobRecord]:
    """Yield the records of run directories; skip those that cannot be read."""
    for path in paths:
        try:
            yield _with_claiming_job(RunDir(path).load())
        except StoreError:
            continue


def _check_folder(context: Context, path: Path, record: JobRecord) -> JobRecord:
    """Return a record read in ``path``; refuse it if it names another folder, because its job writes there.

    Raises:
        JobNotFound: the folder was moved or copied.
    """
    home = Path(record.folder)
    if record.mirror and mirrors(context).resolve() not in home.resolve().parents:
        raise JobNotFound(f"{path} is not a run of this machine: its record names {home} as the local copy")
    if _exists(home) and path.samefile(home):
        return record
    if _exists(home):
        raise JobNotFound(f"{path} is a copy of the run in {home}", hint=f"give {home} as the run")
    raise JobNotFound(
        f"{path} was moved: job {record.job_id or '?'} has its run directory in {home}",
        hint=f"ln -s {shlex.quote(str(path.absolute()))} {shlex.quote(str(home))} makes both paths valid",
    )


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _refuse_unreadable(context: Context, selector: str, path: Path) -> None:
    """Refuse a run that the index contains but whose record cannot be read.

    Raises:
        JobNotFound: its run directory is gone.
        StoreError: its record is damaged.
    """
    run = RunDir(path)
    if run.record_path.exists():
        run.load()
        return
    missing = (
        f"the record in its run directory, {run.record_path},"
        if path.exists()
        else f"its run directory {path}"
    )
    cluster, job_id = context.index.job_in(path)
    raise JobNotFound(
        f"run {selector} is known on this machine, but {missing} does not exist",
        hint=_describe_cancel_command(context, cluster, job_id) if job_id else "",
    )


def _describe_cancel_command(context: Context, cluster: str, job_id: str) -> str:
    """Describe the command that cancels a job whose run directory is gone."""
    try:
        context.cluster(cluster)
    except DtslurmError:  # the cluster no longer has a profile
        return f"scancel {job_id} on {cluster} ends its job if it still runs"
    return f"dtslurm cancel {job_id} --cluster {shlex.quote(cluster)} ends its job if it still runs"


def _with_claiming_job(record: JobRecord) -> JobRecord:
    """Return the record with the job id of the current claim: a later job may continue the run."""
    try:
        match = re.fullmatch(r"job-(\d+(?:\.\d+)?)", str((Path(record.folder) / "claim").readlink()))
    except OSError:
        return record
    if match is None or record.job_id in {None, match[1]}:
        return record
    return replace(record, job_id=match[1], final=())
