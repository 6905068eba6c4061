"""Job dependencies: add ``--dependency`` to a prepared job."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.render.text import insert_dependency
from dtslurm.services.submit.prepare import Prepared


def add_dependency(prepared: Prepared, after: str) -> Prepared:
    """Return the job with a dependency; Slurm cancels the job if a required dependency fails.

    Args:
        after: sbatch's dependency expression, such as ``afterok:17:18``; empty for no dependency.
    """
    if not after:
        return prepared
    submission = prepared.submission
    script = insert_dependency(submission.script, after)
    return replace(prepared, submission=replace(submission, script=script))
