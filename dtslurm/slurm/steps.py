"""Parsers of the steps that squeue and sacct list.

The name of a step that dtslurm starts in an allocation identifies its run, as the comment of a job does.
"""

from __future__ import annotations

from dtslurm.model.runs.state import JobStatus
from dtslurm.slurm import fields
from dtslurm.slurm.arrays import base_id, is_step_id
from dtslurm.slurm.fields import FIELD_END, RECORD_END, STEP_SACCT
from dtslurm.slurm.parse import status


def running(output: str, *, uid: int | None, observed_at: float) -> list[JobStatus]:
    """Parse the output of ``commands.squeue_steps``: the numbered steps; with ``uid``, only that user's."""
    steps = []
    for row in output.split(RECORD_END):
        parts = row.strip("\n").split(FIELD_END, 5)
        if len(parts) != 6 or not is_step_id(parts[0]):
            continue
        step_id, user, start, nodelist, partition, name = parts
        if uid is None or fields.count(user) == uid:
            values = {"start_time": fields.epoch(start), "nodelist": nodelist, "partition": partition}
            steps.append(_step(step_id, name, {**values, "raw_state": "RUNNING"}, "squeue", observed_at))
    return steps


def accounted(output: str, *, observed_at: float) -> list[JobStatus]:
    """Parse the output of ``commands.sacct_steps``."""
    steps = []
    for row in output.splitlines():
        parts = row.split(FIELD_END, len(STEP_SACCT) - 1)
        if len(parts) != len(STEP_SACCT) or not is_step_id(parts[0]):
            continue
        step_id, state, code, start, end, nodelist, name = parts
        values: dict[str, object] = {
            "raw_state": state,
            "exit": fields.exit_code(code),
            "start_time": fields.epoch(start),
            "end_time": fields.epoch(end),
            "nodelist": fields.text(nodelist),
        }
        steps.append(_step(step_id, name, values, "sacct", observed_at))
    return steps


def _step(step_id: str, name: str, values: dict[str, object], source: str, observed_at: float) -> JobStatus:
    ids = {"job_id": step_id, "raw_id": base_id(step_id), "name": "", "comment": name.strip(), "nodes": 1}
    return status({**values, **ids, "submit_time": values["start_time"]}, source, observed_at)
