"""What running jobs do, by the files that their samplers left on this machine or in its copies."""

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


def add_activity(found: Sequence[RunView], now: float) -> list[RunView]:
    """Return runs with what their running jobs do, where that is known here; nobody is asked."""
    return [_with_activity(view, now) for view in found]


def is_running(status: JobStatus) -> bool:
    """Return whether a job runs, by Slurm's word: one that is completing has no work left to do."""
    return status.state is JobState.RUNNING and not status.flags


def _with_activity(view: RunView, now: float) -> RunView:
    if view.trouble:
        return view
    found = {
        status.job_id: activity
        for status in view.statuses
        if is_running(status) and (activity := _activity(view, status, now)) is not None
    }
    return replace(view, activities=found) if found else view


def _activity(view: RunView, status: JobStatus, now: float) -> Activity | None:
    run = view.run_of(status)
    attempts = run.attempts()
    return judge_activity(_nodes(run, attempts[-1]), view.record.world_size, now) if attempts else None


def _nodes(run: RunDir, attempt: int) -> list[NodeActivity]:
    """Return what the samplers of an attempt wrote."""
    paths = sorted((run.path / "metrics" / str(attempt)).glob("activity-*.json"))
    if not paths:
        return []
    from dtslurm.views.telemetry import node_activity

    return [node_activity(values) for path in paths if (values := _sample(path))]


def _sample(path: Path) -> dict[str, Any]:
    """Return a sampler's file with the time at which it was written, empty if it cannot be read."""
    try:
        return {**answers.parse_object(path.read_bytes(), path.name), "written": path.stat().st_mtime}
    except (OSError, TransportError):
        return {}
