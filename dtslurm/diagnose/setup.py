"""Adds failed commands of the job's setup to a verdict.

A failed setup command alone is not a cause, since the script continues, but it may have led to one.
"""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.runs.diagnosis import Verdict

CAUSE = "setup"
_POSSIBLE_CONSEQUENCES = {"import-error", "exit-code", "unknown"}


def add_setup_failures(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict, with the failed setup commands added if they may have led to the failure."""
    setup_failures = [
        reason
        for log, reason in context.job_reasons
        if reason.cause == CAUSE and log.file.startswith("batch")
    ]
    if not setup_failures or verdict.cause not in _POSSIBLE_CONSEQUENCES:
        return verdict
    lines = tuple(line for reason in setup_failures for line in reason.lines)
    return replace(
        verdict,
        summary=f"{verdict.summary}; before that {setup_failures[0].summary}",
        advice=f"{setup_failures[0].advice}; if that failure is intended: {verdict.advice}",
        evidence=(*verdict.evidence, *lines[:2]),
    )
