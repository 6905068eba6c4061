"""The activity of running jobs, read from their samplers' files or the local copies of these files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.diagnose.stall import judge_activity
from dtslurm.errors import TransportError
from dtslurm.model.runs.activity import Activity, NodeActivity
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.remote import answers
from dtslurm.services.runs.status import RunView
from dtslurm.store.rundir import RunDir


def add_activity(views: Sequence[RunView], now: float) -> list[RunView]:
    """Add the activity of running jobs to views, from local files only, without a remote query."""
    return [_with_activity(view, now) for view in views]


def is_running(status: JobStatus) -> bool:
    """Return whether a job runs according to Slurm; a completing job does not count as running."""
    return status.state is JobState.RUNNING and not status.flags


def _with_activity(view: RunView, now: float) -> RunView:
    if view.trouble:
        return view
    activities = {
        status.job_id: activity
        for status in view.statuses
        if is_running(status) and (activity := _judge_job(view, status, now)) is not None
    }
    return replace(view, activities=activities) if activities else view


def _judge_job(view: RunView, status: JobStatus, now: float) -> Activity | None:
    if view.record.holds_allocation or view.record.has_session:  # both may do nothing
        return None
    run = view.run_of(status)
    attempts = run.attempts()
    return judge_activity(_read_nodes(run, attempts[-1]), view.record.world_size, now) if attempts else None


def _read_nodes(run: RunDir, attempt: int) -> list[NodeActivity]:
    """Return the activity of each node from the samplers' files of an attempt."""
    paths = sorted((run.path / "metrics" / str(attempt)).glob("activity-*.json"))
    if not paths:
        return []
    from dtslurm.views.telemetry import node_activity

    return [node_activity(values) for path in paths if (values := _read_sample(path))]


def _read_sample(path: Path) -> dict[str, Any]:
    """Return the values of a sampler's file and its modification time; empty if it cannot be read."""
    try:
        return {**answers.parse_object(path.read_bytes(), path.name), "written": path.stat().st_mtime}
    except (OSError, TransportError):
        return {}
