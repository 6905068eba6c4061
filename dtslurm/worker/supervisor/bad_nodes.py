"""Record the nodes that runs excluded, below the run root, for the jobs that the user submits next."""

import os

from ..lib.json_records import read_object
from ..lib.node_blocklist import exchange, note_line, supervisor_file


def note(run_dir: str, node: str, reason: str, when: float) -> None:
    """Record that a run excludes a node; an unwritable file does not stop the run.

    Args:
        run_dir: the run directory; for an array, the directory of the array task.
        when: seconds since the epoch, as in the run's event.
    """
    whole_run_dir = run_dir
    if os.environ.get("SLURM_ARRAY_TASK_ID") and os.path.basename(os.path.dirname(run_dir)) == "tasks":
        whole_run_dir = os.path.dirname(os.path.dirname(run_dir))
    cluster = read_object(os.path.join(whole_run_dir, "job.json")).get("cluster")
    if not isinstance(cluster, str) or not cluster:  # node names are ambiguous without the cluster's name
        return
    job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
    line = note_line(cluster, node, reason, job_id, when)
    try:
        exchange(supervisor_file(os.path.dirname(whole_run_dir)), [line], is_own_file=True)
    except OSError:
        return
