"""Recognizes a full file system of the run directory, where the logs cannot record the error."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

_FULL = 64 * 1024  # bytes; a full file system may have fragments left
_UNEXPLAINED = {"exit-code", "unknown", "killed"}


def add_full_disk(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict, with a remark if the run directory's file system is full now.

    A failure without an explanation is attributed to the full file system, which is a guess; other verdicts
    keep their cause.
    """
    free = context.findings.free
    if free is None or free >= _FULL:
        return verdict
    remark = f"the file system of the run directory is full: {free} bytes are free"
    lines = (EvidenceLine(rank=None, file="", line=None, text=remark), *verdict.evidence)
    if verdict.cause == "none":
        return replace(
            verdict, summary=f"{verdict.summary}; but {remark}, and logs may be cut", evidence=lines
        )
    if verdict.cause not in _UNEXPLAINED:
        return replace(verdict, evidence=lines)
    return replace(
        verdict,
        cause="disk-full",
        summary="the file system of the run directory is full, and the logs end at that moment",
        confidence=0.6,
        advice="free space in it (dtslurm clean shows the size of old runs), or set another --run-root",
        evidence=lines,
    )
