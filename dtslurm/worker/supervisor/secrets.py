"""The values of secrets: deleted when the run is over, for no start is left that reads them."""

import contextlib
import os
from typing import Mapping

NAME = "secrets"
MARKS = "secrets-read"  # a file for each task of an array that needs them no more


def delete_after_end(run_dir: str, env: Mapping[str, str]) -> None:
    """Delete the secrets of a run that is over; those of an array when its last task is over."""
    with contextlib.suppress(OSError):  # `dtslurm clean` deletes what stays
        task = env.get("SLURM_ARRAY_TASK_ID")
        if task:
            run_dir = os.path.dirname(os.path.dirname(run_dir.rstrip("/")))
            if not os.path.lexists(os.path.join(run_dir, NAME)):
                return
            marks = os.path.join(run_dir, MARKS)
            os.makedirs(marks, 0o700, exist_ok=True)
            with open(os.path.join(marks, task), "w"):
                pass
            if len(os.listdir(marks)) < int(env.get("SLURM_ARRAY_TASK_COUNT") or 1 << 30):
                return
        os.unlink(os.path.join(run_dir, NAME))
