"""Delete the secrets of a run at its end, when no later start of the job needs them."""

import contextlib
import os
from typing import Mapping

NAME = "secrets"
RAY_FILE = "ray-token"  # the token of ray_node.py, of a run or a task of an array
MARKS = "secrets-read"  # folder with a file for each array task that no longer needs them


def delete_after_end(run_dir: str, env: Mapping[str, str]) -> None:
    """Delete the secrets of a run, or of an array after the end of its last task."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, RAY_FILE))
    with contextlib.suppress(OSError):  # `dtslurm clean` deletes the file later
        task = env.get("SLURM_ARRAY_TASK_ID")
        if task:
            run_dir = os.path.dirname(os.path.dirname(run_dir.rstrip("/")))
            if not os.path.lexists(os.path.join(run_dir, NAME)):
                return
            marker_dir = os.path.join(run_dir, MARKS)
            os.makedirs(marker_dir, 0o700, exist_ok=True)
            with open(os.path.join(marker_dir, task), "w"):
                pass
            if len(os.listdir(marker_dir)) < int(env.get("SLURM_ARRAY_TASK_COUNT") or 1 << 30):
                return
        os.unlink(os.path.join(run_dir, NAME))
