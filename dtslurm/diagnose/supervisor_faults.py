"""Verdicts on a supervisor that was stopped, crashed or killed, or that stopped the run."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import CERTAIN, FailureContext
from dtslurm.diagnose.supervisor_events import (
    BATCH_KILLED,
    SUPERVISOR_CRASHED,
    find_killed_script,
    find_stopped_supervisor,
)
from dtslurm.model.exit_codes import NO_PROGRESS
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

_ADVICE_KILLED = (
    "find the sender: the kernel because memory ran out (dmesg on the first node), a person, or a "
    "clean-up script of the cluster; then submit the run again"
)
_ADVICE_CRASHED = (
    "logs/batch.log in the run directory contains the traceback; submit the run again when the cause "
    "is removed"
)


def with_stopped_supervisor(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict on a running job, with a remark if its supervisor is stopped."""
    remark = "" if context.facts.over else find_stopped_supervisor(context.findings.events)
    return replace(verdict, summary=f"{verdict.summary}; {remark}") if remark else verdict


def with_stopped_run(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict, with a remark if the supervisor stopped a run that made no progress."""
    reasons = [
        str(event.get("reason"))
        for event in context.findings.events
        if event.get("event") == "decision"
        and event.get("action") == "stop"
        and event.get("attempt") == context.facts.attempt
    ]
    if context.facts.exit_code != NO_PROGRESS or not reasons:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}; the supervisor stopped the run: {reasons[-1]}")


def batch_script_killed(context: FailureContext) -> Verdict | None:
    """Return the verdict that the batch script was killed or its supervisor ended early, or None."""
    facts, events = context.facts, context.findings.events
    summary = find_killed_script(events, facts.signal) if facts.state == "FAILED" else ""
    if not summary:
        return None
    if any(
        event.get("event") == "attempt_ended" and event.get("attempt") == facts.attempt for event in events
    ):
        return None
    if any(end.reason and end.reason.strength >= CERTAIN for end in context.of_kind("cause")):
        return None
    if summary == BATCH_KILLED and any(event.get("event") == "attempt" for event in events):
        summary += ". The supervisor of the attempt ended with it"
    ended_by = f"signal {facts.signal}" if facts.signal else f"exit code {facts.exit_code}"
    text = f"the job's state is {facts.state} by {ended_by}, and the end of its attempt is not recorded"
    crashed = summary == SUPERVISOR_CRASHED
    return Verdict(
        cause="exit-code" if crashed else "killed",
        summary=summary,
        time=facts.end,
        signal=facts.signal,
        exit_code=facts.exit_code,
        confidence=0.85,
        blame="unknown",
        evidence=(EvidenceLine(rank=None, file="", line=None, text=text),),
        advice=_ADVICE_CRASHED if crashed else _ADVICE_KILLED,
    )
