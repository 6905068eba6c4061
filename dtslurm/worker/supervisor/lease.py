"""The lease on a run: the number in the run directory's file ``attempt``. Lower attempts must stop writing.

Slurm may consider a start of a job dead and start the job again while the old start still runs. The new
start takes the lease; the old one, its ranks included, reads the lease and ends.
"""

import os
from typing import Optional

from ..lib.json_records import write_atomically
from .files import is_there, text_of, try_for

NAME = "attempt"
STOP = "stop"
RESTART = "restart"
DONE = "done"


def take(run_dir: str, attempt: int) -> bool:
    """Take the lease for an attempt; return False if a later attempt holds it."""
    if not holds(run_dir, attempt):
        return False
    write_atomically(os.path.join(run_dir, NAME), "{}\n".format(attempt))
    return True


def holder(run_dir: str) -> Optional[int]:
    """Return the attempt that holds the lease, None if no attempt has taken it yet."""
    text = (text_of(os.path.join(run_dir, NAME)) or "").strip()
    return int(text) if text.isdigit() else None


def holds(run_dir: str, attempt: int) -> bool:
    """Return whether no later attempt holds the lease. An unreadable lease counts as held."""
    current_holder = holder(run_dir)
    return current_holder is None or current_holder <= attempt


def stopped(run_dir: str, patience_s: float = 0.0) -> bool:
    """Return whether the run must not start again: a file ``stop`` exists here, or above an array task.

    If the file server does not answer, the check is retried for `patience_s`; see `files.is_there`.
    """
    array_dir = os.path.dirname(os.path.dirname(run_dir.rstrip("/")))
    is_array_task = os.path.basename(os.path.dirname(run_dir.rstrip("/"))) == "tasks"
    folders = [run_dir, array_dir] if is_array_task else [run_dir]
    return any(is_there(os.path.join(folder, STOP), patience_s) for folder in folders)


def restart_requested(run_dir: str, attempt: int) -> bool:
    """Return whether the user has requested that this attempt ends and a new one begins."""
    return (text_of(os.path.join(run_dir, RESTART)) or "").strip() == str(attempt)


def finish(run_dir: str, attempt: int, patience_s: float) -> None:
    """Record that training is done, for the case that Slurm missed the end of the job and starts it again."""
    path = os.path.join(run_dir, DONE)
    try_for(lambda: write_atomically(path, "{}\n".format(attempt)), patience_s)


def finished(run_dir: str, patience_s: float = 0.0) -> bool:
    """Return whether training is done and no ``dtslurm requeue`` has cleared that since."""
    return is_there(os.path.join(run_dir, DONE), patience_s)
