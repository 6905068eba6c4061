"""Queue a prepared submission: record the intent, call the scheduler once, record the answer."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import dtslurm
from dtslurm.errors import SlurmUnavailable, StoreError, SubmitRejected, SubmitUnknown
from dtslurm.model.job import JobRecord, Submission
from dtslurm.model.shell import join
from dtslurm.render.script import training_command
from dtslurm.services.context import Context
from dtslurm.services.prepare import Prepared
from dtslurm.services.records import append_event, forget, remember, save
from dtslurm.store.rundir import RunDir
from dtslurm.transport.base import Transport


def submit(context: Context, prepared: Prepared) -> JobRecord:
    """Queue the submission and return its record.

    The record is on disk before the scheduler is called, so that a lost answer can be looked up.

    Raises:
        StoreError: the run directory cannot be written; nothing was queued.
        SubmitRejected, SlurmUnavailable: nothing was queued, and the run directory is gone again.
        SubmitUnknown: there may be a job; ``dtslurm status`` will look it up.
    """
    submission, cluster = prepared.submission, prepared.cluster
    record = _planned(context, submission, str(cluster.path))
    run = RunDir(Path(record.run_dir))
    try:
        run.create(context.transport, record, _details(context, submission), submission.script)
        remember(context.index, record)
        job_id = cluster.scheduler.submit(submission, str(run.script_path))
    except SubmitUnknown:
        save(context, run, replace(record, phase="unknown"))
        raise
    except (StoreError, SubmitRejected, SlurmUnavailable):
        forget(context, run, record)
        raise
    record = replace(record, phase="submitted", job_id=job_id)
    save(context, run, record)
    append_event(run, context.clock(), "submitted", job_id=job_id, cluster=cluster.name)
    return record


def _planned(context: Context, submission: Submission, profile: str) -> JobRecord:
    spec, layout = submission.spec, submission.layout
    return JobRecord(
        token=submission.token,
        cluster=submission.cluster,
        name=spec.name,
        run_dir=submission.run_dir,
        phase="planned",
        created_at=context.clock(),
        profile=profile,
        array=spec.array,
        world_size=layout.world_size,
        ranks_per_node=layout.ranks_per_node,
        launcher=spec.launcher,
        script=spec.script,
        command=join(training_command(spec)),
        work_dir=spec.work_dir,
        time_limit=layout.time.seconds if layout.time else None,
    )


def _details(context: Context, submission: Submission) -> dict[str, object]:
    """Return what only people and bug reports need of a submission."""
    return {
        "spec": submission.spec,
        "layout": submission.layout,
        "origins": submission.origins,
        "notices": submission.notices,
        "versions": {"dtslurm": dtslurm.__version__},
        "git": _git_state(context.transport, submission.spec.work_dir),
        "submitted_from": os.uname().nodename,
    }


def _git_state(transport: Transport, folder: str) -> dict[str, object] | None:
    """Return commit, branch and whether tracked files differ; None outside a git work tree."""
    if shutil.which("git") is None:
        return None
    words = ["git", "-C", folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    found = transport.run(words, timeout=10)
    if not found.ok:
        return None
    lines = found.stdout.splitlines()
    head = dict(
        line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and line.count(" ") > 1
    )
    return {
        "commit": head.get("branch.oid"),
        "branch": head.get("branch.head"),
        "dirty": any(not line.startswith("#") for line in lines),
    }
