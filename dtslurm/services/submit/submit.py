"""Queue a prepared submission: save its record, create the run directory, call the scheduler once."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S, CommandScheduler
from dtslurm.services.request import staging
from dtslurm.services.request.code_snapshot import hash_cache
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.spec import shell_file
from dtslurm.services.runs.monitor import invalidating_cache
from dtslurm.services.runs.records import append_event, forget, noting, planned_record, remember, save, settle
from dtslurm.services.runs.runs import describe_queued
from dtslurm.services.submit import supervision
from dtslurm.services.submit.idempotency import find_existing_run
from dtslurm.services.submit.prepare import Prepared
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.submission_worker import submission_worker_of
from dtslurm.slurm import commands
from dtslurm.store import codec
from dtslurm.store.delivery import Delivery, SubmitCommand, deliver
from dtslurm.store.git_tree import GitState
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.rundir import RunDir
from dtslurm.store.wire_format import objects_folder
from dtslurm.transport.base import Completed

Progress = Callable[[int, int], None]
NO_JOB = "interrupted: no job was submitted"
SAMPLER = (
    "lib/json_records.py",
    "sampler.py",
    "sampler_values.py",
    "sampler_ranks.py",
    "sampler_group.py",
    "sampler_nvidia.py",
    "sampler_amd.py",
)


def submit(context: Context, prepared: Prepared, progress: Progress = lambda *_: None) -> JobRecord:
    """Queue the submission and return its record.

    The record is on disk before any file is sent, and the run directory is complete before the scheduler is
    called. So a job can be found if the scheduler's answer is lost, and no job starts without its files.

    Args:
        progress: called with (bytes sent, total bytes) while code is sent.

    Raises:
        StoreError: a file could not be written; nothing was queued.
        SubmitRejected, SlurmUnavailable, HostUnavailable: nothing was queued, and the run directory was
            removed.
        SubmitUnknown: the job may be queued; ``dtslurm status`` looks for it.
        SubmitInterrupted: the user pressed Ctrl-C; the message states whether a job was queued.
    """
    while True:
        try:
            return _submit(context, prepared, progress)
        except RunExists:  # --once: another submission has used this key
            if first := find_existing_run(context, prepared):
                return first


def _submit(context: Context, prepared: Prepared, progress: Progress) -> JobRecord:
    submission, cluster = prepared.submission, prepared.cluster
    record = planned_record(context, prepared)
    run = RunDir(Path(record.folder))
    delivery = _build_delivery(context, prepared, record)
    created_folder = False  # with the same key, another client may create the same folder
    job_id = None
    try:
        if cluster.remote:
            files = {**delivery.files, **_encode_notifications(prepared, with_secrets=False)}
            run.create(context.transport, {**files, RunDir.RECORD: _encode_record(prepared, record)})
            remember(context.index, record)
        else:
            with noting(context, record):
                deliver(cluster.transport, delivery, progress=progress)
        created_folder = True
        with invalidating_cache(context, cluster):
            job_id = _queue(context, cluster, submission, delivery, run, progress)
    except SubmitUnknown:
        _keep(context, replace(record, phase="unknown"))
        raise
    except RunExists:
        raise
    except DtslurmError as error:
        if created_folder or not run.path.exists():
            forget(context, cluster, record, placed=not isinstance(error, StoreError))
        raise
    except KeyboardInterrupt:
        if not created_folder and job_id is None:
            raise SubmitInterrupted(NO_JOB) from None
        raise _settle_interrupted(context, cluster, record, job_id) from None
    try:
        record = replace(record, phase="submitted", job_id=job_id)
        _keep(context, record)
        if not cluster.remote:  # over SSH, the worker program has recorded the event
            append_event(context, record, "submitted", job_id=job_id, cluster=cluster.name)
    except KeyboardInterrupt:
        raise _settle_interrupted(context, cluster, record, job_id) from None
    return record


def _settle_interrupted(
    context: Context, cluster: ActiveCluster, record: JobRecord, job_id: str | None
) -> SubmitInterrupted:
    """Record the job of an interrupted submission, if it has one; return the interruption.

    A run without a known job is marked as withdrawn, so a job that the scheduler does not list yet would end
    without work.
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
    """Save the record of a job that may be queued; if saving fails, ``dtslurm status`` can find the job."""
    try:
        save(context, record)
    except StoreError:  # raising this error would mean that nothing was queued
        remember(context.index, record)


def _queue(
    context: Context,
    cluster: ActiveCluster,
    submission: Submission,
    delivery: Delivery,
    run: RunDir,
    progress: Progress,
) -> str:
    """Queue the script; over SSH, the same command also creates the run directory."""
    script, scheduler = f"{submission.run_dir}/{RunDir.SCRIPT}", cluster.scheduler
    with run.under_way():
        if not cluster.remote or not isinstance(scheduler, CommandScheduler):
            return scheduler.submit(submission, script)
        answer: Completed | TransportError | None
        try:
            answer = deliver(
                cluster.transport,
                delivery,
                SubmitCommand(
                    scheduler.submit_command(submission, script),
                    event={"cluster": cluster.name},
                    timeout=SUBMIT_TIMEOUT_S,
                ),
                worker=submission_worker_of(context, cluster),
                progress=progress,
                known_objects=KnownObjects.of(hash_cache(context), cluster.name, delivery.objects),
            )
        except TransportError as error:
            answer = error
        if answer is None:
            answer = TransportError("the run directory was created, but no job was queued")
        return scheduler.read_submit_answer(submission, answer)


def _build_delivery(context: Context, prepared: Prepared, record: JobRecord) -> Delivery:
    submission = prepared.submission
    files = {
        **prepared.payload,
        RunDir.SCRIPT: submission.script.encode("utf-8", "surrogateescape"),
        RunDir.RECORD: _encode_record(prepared, replace(record, mirror="")),
        "logs/batch.log": b"",
    }
    if submission.step_script:
        files[commands.STEP_SCRIPT] = submission.step_script.encode("utf-8", "surrogateescape")
    if submission.spec.sample:
        files |= {Path(name).name: assets.worker(name).read_bytes() for name in SAMPLER}
    if prepared.git and prepared.git.diff:
        files["code.diff"] = prepared.git.diff
    if prepared.secrets:
        files[RunDir.SECRETS] = shell_file(prepared.secrets)
    files.update(_encode_notifications(prepared, with_secrets=True))
    if submission.spec.supervised:
        files.update(supervision.files(context))
        files.update(supervision.health_files(submission, prepared.cluster.profile))
        files.update(supervision.roles_file(submission, prepared.cluster.profile))
    files.update(staging.files(submission.spec))
    root = PurePosixPath(submission.run_dir).parent
    return Delivery(
        run_dir=submission.run_dir,
        objects=objects_folder(str(root)),
        files=files,
        snapshot=prepared.code.snapshot if prepared.code else None,
    )


def _encode_notifications(prepared: Prepared, *, with_secrets: bool) -> dict[str, bytes]:
    """Return the file with the addresses of messages; no file without addresses."""
    if prepared.notifications is None:
        return {}
    spec, cluster = prepared.submission.spec, prepared.submission.cluster
    return {RunDir.NOTIFY: prepared.notifications.encode(spec.name, cluster, with_secrets=with_secrets)}


def _encode_record(prepared: Prepared, record: JobRecord) -> bytes:
    return codec.encode({"schema": codec.SCHEMA, **codec.plain(record), **_submission_details(prepared)})


def _submission_details(prepared: Prepared) -> dict[str, object]:
    """Return the details of a submission that only users and bug reports need."""
    submission = prepared.submission
    return {
        "spec": submission.spec,
        "layout": submission.layout,
        "origins": submission.origins,
        "notices": submission.notices,
        "request": _resubmittable_request(prepared.request),
        "submitted_in": prepared.folder,
        "versions": {"dtslurm": dtslurm.__version__},
        "git": _git_details(prepared.git),
        "script_sha256": prepared.script_sha256 or None,
        "submitted_from": os.uname().nodename,
    }


def _resubmittable_request(request: JobRequest | None) -> JobRequest | None:
    """Return a request that can be submitted again.

    None for a function, whose pickle is for one run only, and for an allocation, which runs no script.
    Addresses of messages that are URLs are left out: only the run's private file contains them.
    """
    if request is None or request.payload or request.idle_limit is not None:
        return None
    return replace(request, notify=tuple(text for text in request.notify if "://" not in text))


def _git_details(git: GitState | None) -> dict[str, object] | None:
    """Return the commit and branch of the code at submission; ``code.diff`` holds the uncommitted changes."""
    if git is None:
        return None
    return {"commit": git.commit, "branch": git.branch, "dirty": git.dirty}
