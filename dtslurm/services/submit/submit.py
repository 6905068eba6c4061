"""Queue a prepared submission: record the intent, put the run directory in place, call the scheduler once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import dtslurm
from dtslurm import assets
from dtslurm.errors import (
    DtslurmError,
    RunExists,
    StoreError,
    SubmitInterrupted,
    SubmitUnknown,
    TransportError,
)
from dtslurm.model.jobs.job import JobRecord, Submission
from dtslurm.scheduler.base import Runner
from dtslurm.services.request import staging
from dtslurm.services.request.code_snapshot import hash_cache
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.secrets import shell_file
from dtslurm.services.runs.monitor import invalidating_cache
from dtslurm.services.runs.records import append_event, forget, noting, planned_record, remember, save, settle
from dtslurm.services.runs.runs import describe_queued
from dtslurm.services.submit import supervision
from dtslurm.services.submit.idempotency import find_existing_run
from dtslurm.services.submit.prepare import Prepared
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.submission_worker import submission_worker_of
from dtslurm.store import codec
from dtslurm.store.delivery import Delivery, deliver
from dtslurm.store.git_tree import GitState
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.rundir import RunDir
from dtslurm.store.wire_format import objects_folder
from dtslurm.transport.base import Completed

Progress = Callable[[int, int], None]
NO_JOB = "interrupted: no job was submitted"
SAMPLER = (
    "sampler.py",
    "sampler_values.py",
    "sampler_ranks.py",
    "sampler_group.py",
    "sampler_nvidia.py",
    "sampler_amd.py",
)


def submit(context: Context, prepared: Prepared, progress: Progress = lambda *_: None) -> JobRecord:
    """Queue the submission and return its record.

    The intent is on disk before anything is sent, and the run directory is complete before the scheduler is
    called, so that a lost answer can be looked up and no job starts without its files.

    Args:
        progress: called with (bytes sent, bytes in all) while code travels.

    Raises:
        StoreError: a disk refused; nothing was queued.
        SubmitRejected, SlurmUnavailable, HostUnavailable: nothing was queued, and its folder is gone again.
        SubmitUnknown: there may be a job; ``dtslurm status`` will look it up.
        SubmitInterrupted: Ctrl-C arrived; its text tells whether there is a job.
    """
    while True:
        try:
            return _submit(context, prepared, progress)
        except RunExists:  # --once: somebody was first
            if first := find_existing_run(context, prepared):
                return first


def _submit(context: Context, prepared: Prepared, progress: Progress) -> JobRecord:
    submission, cluster = prepared.submission, prepared.cluster
    record = planned_record(context, prepared)
    run = RunDir(Path(record.folder))
    parcel = _parcel(context, prepared, record)
    ours = False  # under one key another client may make the same folder
    job_id = None
    try:
        if cluster.remote:
            run.create(context.transport, {**parcel.files, RunDir.RECORD: _document(prepared, record)})
            remember(context.index, record)
        else:
            with noting(context, record):
                deliver(cluster.transport, parcel, progress=progress)
        ours = True
        with invalidating_cache(context, cluster):
            job_id = _queue(context, cluster, submission, parcel, run, progress)
    except SubmitUnknown:
        _keep(context, replace(record, phase="unknown"))
        raise
    except RunExists:
        raise
    except DtslurmError as error:
        if ours or not run.path.exists():
            forget(context, cluster, record, placed=not isinstance(error, StoreError))
        raise
    except KeyboardInterrupt:
        if not ours and job_id is None:
            raise SubmitInterrupted(NO_JOB) from None
        raise _settle_interrupted(context, cluster, record, job_id) from None
    try:
        record = replace(record, phase="submitted", job_id=job_id)
        _keep(context, record)
        if not cluster.remote:  # over SSH the far side has noted it at once
            append_event(context, record, "submitted", job_id=job_id, cluster=cluster.name)
    except KeyboardInterrupt:
        raise _settle_interrupted(context, cluster, record, job_id) from None
    return record


def _settle_interrupted(
    context: Context, cluster: ActiveCluster, record: JobRecord, job_id: str | None
) -> SubmitInterrupted:
    """Return the interruption of a submission, and record its job where there is one.

    A job that the scheduler does not list yet would end without work: the run is claimed for nobody.
    """
    try:
        if job_id is None:
            record = settle(context, cluster, record, abandoned=True)
        else:
            record = replace(record, phase="submitted", job_id=job_id)
            _keep(context, record)
    except (DtslurmError, KeyboardInterrupt):
        if job_id is None:
            return SubmitInterrupted(
                "interrupted: it is not known whether a job was submitted; dtslurm status shows it"
            )
    if record.job_id is None:
        return SubmitInterrupted(NO_JOB)
    return SubmitInterrupted(f"interrupted: {describe_queued(context, [record])}", record)


def _keep(context: Context, record: JobRecord) -> None:
    """Write down what is known of a job that may be queued; if no disk takes it, a look-up will tell."""
    try:
        save(context, record)
    except StoreError:  # an error now would say that nothing was queued
        remember(context.index, record)


def _queue(
    context: Context,
    cluster: ActiveCluster,
    submission: Submission,
    parcel: Delivery,
    kept: RunDir,
    progress: Progress,
) -> str:
    """Queue the script; over SSH the run directory is put in place by the same command."""
    script = f"{submission.run_dir}/{RunDir.SCRIPT}"
    if not cluster.remote:
        with kept.under_way():
            return cluster.scheduler.submit(submission, script, _without(cluster, submission.spec.secrets))

    def run(argv: Sequence[str], timeout: float) -> Completed:
        answer = deliver(
            cluster.transport,
            parcel,
            then=argv,
            event={"cluster": cluster.name},
            worker=submission_worker_of(context, cluster),
            timeout=timeout,
            progress=progress,
            known=KnownObjects.of(hash_cache(context), cluster.name, parcel.objects),
        )
        if answer is None:
            raise TransportError("the run directory was put in place, but nothing was queued")
        return answer

    with kept.under_way():
        return cluster.scheduler.submit(submission, script, run)


def _without(cluster: ActiveCluster, names: Sequence[str]) -> Runner | None:
    """Return what keeps secrets out of sbatch's own environment, which some sites pass on to the job."""
    if not names:
        return None
    hide = ["env", *(f"--unset={name}" for name in names)]
    return lambda argv, timeout: cluster.transport.run([*hide, *argv], timeout=timeout)


def _parcel(context: Context, prepared: Prepared, record: JobRecord) -> Delivery:
    submission = prepared.submission
    files = {
        **prepared.payload,
        RunDir.SCRIPT: submission.script.encode("utf-8", "surrogateescape"),
        RunDir.RECORD: _document(prepared, replace(record, mirror="")),
        "logs/batch.log": b"",
    }
    if submission.spec.sample:
        files |= {name: assets.worker(name).read_bytes() for name in SAMPLER}
    if prepared.git and prepared.git.diff:
        files["code.diff"] = prepared.git.diff
    if prepared.secrets:
        files[RunDir.SECRETS] = shell_file(prepared.secrets)
    if submission.spec.supervised:
        files.update(supervision.files(context))
        files.update(supervision.health_file(submission, prepared.cluster.profile))
    files.update(staging.files(submission.spec))
    root = PurePosixPath(submission.run_dir).parent
    return Delivery(
        run_dir=submission.run_dir,
        objects=objects_folder(str(root)),
        files=files,
        snapshot=prepared.code.snapshot if prepared.code else None,
    )


def _document(prepared: Prepared, record: JobRecord) -> bytes:
    return codec.encode({"schema": codec.SCHEMA, **codec.plain(record), **_details(prepared)})


def _details(prepared: Prepared) -> dict[str, object]:
    """Return what only people and bug reports need of a submission."""
    submission = prepared.submission
    return {
        "spec": submission.spec,
        "layout": submission.layout,
        "origins": submission.origins,
        "notices": submission.notices,
        "request": _resubmittable_request(prepared.request),
        "submitted_in": prepared.folder,
        "versions": {"dtslurm": dtslurm.__version__},
        "git": _git(prepared.git),
        "script_sha256": prepared.script_sha256 or None,
        "submitted_from": os.uname().nodename,
    }


def _resubmittable_request(request: JobRequest | None) -> JobRequest | None:
    """Return what can be asked for once more: a function's pickle is for one run."""
    return None if request is None or request.payload else request


def _git(git: GitState | None) -> dict[str, object] | None:
    """Return the commit and branch of the code at the submission; the difference is in ``code.diff``."""
    if git is None:
        return None
    return {"commit": git.commit, "branch": git.branch, "dirty": git.dirty}
