"""Where the logs' own file system is full nothing in them can say so."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

_FULL = 64 * 1024  # bytes; what is left then are fragments
_UNEXPLAINED = {"exit-code", "unknown", "killed"}


def with_full_disk(verdict: Verdict, case: FailureContext) -> Verdict:
    """Return the verdict as it is where the run directory's file system is full now, when it is read.

    A failure that nothing explains is taken to come of it, which is a guess; other verdicts keep their cause.
    """
    free = case.findings.free
    if free is None or free >= _FULL:
        return verdict
    told = f"the file system of the run directory is full: {free} bytes are free"
    lines = (EvidenceLine(rank=None, file="", line=None, text=told), *verdict.evidence)
    if verdict.cause == "none":
        return replace(verdict, summary=f"{verdict.summary}; but {told}, and logs may be cut", evidence=lines)
    if verdict.cause not in _UNEXPLAINED:
        return replace(verdict, evidence=lines)
    return replace(
        verdict,
        cause="disk-full",
        summary="the file system of the run directory is full, and the logs are cut where it was",
        confidence=0.6,
        advice="free space there (dtslurm clean shows what old runs take up), or give another --run-root",
        evidence=lines,
    )
