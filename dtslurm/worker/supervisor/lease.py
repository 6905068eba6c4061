"""Who may write: the number in the run directory's file ``attempt``. Whoever has a lower one is over.

Slurm may believe a copy of a job dead and start it again while the old copy still runs. The new one takes the
lease; the old one, its ranks included, reads it and ends.
"""

import os
from typing import Optional

from .files import is_there, put, text_of, try_for

NAME = "attempt"
STOP = "stop"
DONE = "done"


def take(run_dir: str, attempt: int) -> bool:
    """Take the lease for an attempt; False if a later attempt has it."""
    if not holds(run_dir, attempt):
        return False
    put(os.path.join(run_dir, NAME), "{}\n".format(attempt))
    return True


def holder(run_dir: str) -> Optional[int]:
    """Return the attempt that may write, None where nobody took the lease yet."""
    text = (text_of(os.path.join(run_dir, NAME)) or "").strip()
    return int(text) if text.isdigit() else None


def holds(run_dir: str, attempt: int) -> bool:
    """Tell whether no later attempt has the lease. A lease that cannot be read takes nothing from anybody."""
    held = holder(run_dir)
    return held is None or held <= attempt


def stopped(run_dir: str, patience_s: float = 0.0) -> bool:
    """Tell whether somebody wants no further start: a file ``stop`` here, or above an array's task.

    A file server that does not answer is asked again for `patience_s`; see `files.is_there`.
    """
    above = os.path.dirname(os.path.dirname(run_dir.rstrip("/")))
    task = os.path.basename(os.path.dirname(run_dir.rstrip("/"))) == "tasks"
    folders = [run_dir, above] if task else [run_dir]
    return any(is_there(os.path.join(folder, STOP), patience_s) for folder in folders)


def finish(run_dir: str, attempt: int, patience_s: float) -> None:
    """Leave word that training is done: Slurm starts a job anew whose end it did not hear of."""
    path = os.path.join(run_dir, DONE)
    try_for(lambda: put(path, "{}\n".format(attempt)), patience_s)


def finished(run_dir: str, patience_s: float = 0.0) -> bool:
    """Tell whether training is done, and nobody has asked for more since (``dtslurm requeue``)."""
    return is_there(os.path.join(run_dir, DONE), patience_s)
