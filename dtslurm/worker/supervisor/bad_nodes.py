"""The nodes that runs excluded, noted below the run root for the jobs that the user submits next."""

import os

from ..lib.node_blocklist import exchange, note_line, supervisor_file
from .files import json_of


def note(run_dir: str, node: str, reason: str, when: float) -> None:
    """Note that a run excludes a node; an unwritable file does not stop the run.

    Args:
        run_dir: the run directory, of an array that of one task.
        when: seconds since the epoch, as in the event of the run.
    """
    run = run_dir
    if os.environ.get("SLURM_ARRAY_TASK_ID") and os.path.basename(os.path.dirname(run_dir)) == "tasks":
        run = os.path.dirname(os.path.dirname(run_dir))
    cluster = json_of(os.path.join(run, "job.json")).get("cluster")
    if not isinstance(cluster, str) or not cluster:  # node names mean nothing without their cluster
        return
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
    line = note_line(cluster, node, reason, job, when)
    try:
        exchange(supervisor_file(os.path.dirname(run)), [line], own=True)
    except OSError:
        return
