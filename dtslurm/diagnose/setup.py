"""A line of the job's setup that failed is no cause by itself, as scripts go on; but it may be behind one."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.runs.diagnosis import Verdict

CAUSE = "setup"
_MAY_COME_OF_IT = {"import-error", "exit-code", "unknown"}


def with_setup(verdict: Verdict, case: FailureContext) -> Verdict:
    """Return the verdict with a remark on what failed in the batch script before, where it may come of it."""
    said = [reason for log, reason in case.others if reason.cause == CAUSE and log.file.startswith("batch")]
    if not said or verdict.cause not in _MAY_COME_OF_IT:
        return verdict
    lines = tuple(line for reason in said for line in reason.lines)
    return replace(
        verdict,
        summary=f"{verdict.summary}; before that {said[0].summary}",
        advice=f"{said[0].advice}; if that is meant to be so: {verdict.advice}",
        evidence=(*verdict.evidence, *lines[:2]),
    )
