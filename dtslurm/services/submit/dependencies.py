"""A job that waits for others."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.render.text import depending
from dtslurm.services.submit.prepare import Prepared


def behind(prepared: Prepared, after: str) -> Prepared:
    """Return a job that waits for others; where one fails that must not, it ends unstarted.

    Args:
        after: sbatch's expression, such as ``afterok:17:18``; empty for nothing to wait for.
    """
    if not after:
        return prepared
    submission = prepared.submission
    script = depending(submission.script, after)
    return replace(prepared, submission=replace(submission, script=script))
