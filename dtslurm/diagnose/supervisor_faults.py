"""What was recorded of a supervisor that was stopped, or that was killed with its batch script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtslurm.diagnose.case import CERTAIN, Case
from dtslurm.model.diagnosis import EvidenceLine, Verdict

BATCH_KILLED = "SIGKILL ended the batch script before any rank had failed; Slurm then ended the ranks"
SUPERVISOR_KILLED = "the supervisor was killed, and the batch script restarted it no more"
SUPERVISOR_STOPPED = "SUPERVISOR STOPPED"
_SIGKILL = 9
_STEPS = {"started", "attempt", "attempt_ended", "supervisor_killed", "ended"}
_LATER = {"supervisor_continued", "supervisor_killed", "started", "ended", "cancel"}


def find_stopped_supervisor(events: Iterable[Mapping[str, Any]]) -> str:
    """Return in words that the supervisor is stopped, with a fix; empty where it is not known to be."""
    last: Mapping[str, Any] = {}
    for event in events:
        if event.get("event") == "supervisor_stopped":
            last = event
        elif event.get("event") in _LATER:
            last = {}
    if not last:
        return ""
    pid, node = str(last.get("pid"))[:20], str(last.get("node"))[:100]
    return (
        f"the supervisor (process {pid} on {node}) is stopped, as by SIGSTOP: until it continues, no fault "
        f"of a rank is noticed and the job does not end; run kill -CONT {pid} on {node}"
    )


def with_stopped_supervisor(verdict: Verdict, case: Case) -> Verdict:
    """Return the verdict on a running job with what is known of a supervisor that is stopped."""
    stopped = "" if case.facts.over else find_stopped_supervisor(case.findings.events)
    return replace(verdict, summary=f"{verdict.summary}; {stopped}") if stopped else verdict


def find_killed_script(events: Iterable[Mapping[str, Any]], signal: int | None) -> str:
    """Return in words that the batch script or its supervisor was killed, empty where nothing tells so.

    Args:
        signal: by which the job ended, as Slurm shows it: it is the batch script's.
    """
    kinds = [str(event.get("event")) for event in events]
    told = [kind for kind in kinds if kind in _STEPS]
    if told[-2:] == ["supervisor_killed", "ended"]:
        return SUPERVISOR_KILLED
    return BATCH_KILLED if signal == _SIGKILL and told and told[-1] not in {"attempt_ended", "ended"} else ""


def batch_script_killed(case: Case) -> Verdict | None:
    """Return the verdict that the batch script or its supervisor was killed, None where nothing tells so."""
    facts, events = case.facts, case.findings.events
    summary = find_killed_script(events, facts.signal) if facts.state == "FAILED" else ""
    if not summary:
        return None
    if any(one.get("event") == "attempt_ended" and one.get("attempt") == facts.attempt for one in events):
        return None
    if any(end.reason and end.reason.strength >= CERTAIN for end in case.of_kind("cause")):
        return None
    if summary == BATCH_KILLED and any(event.get("event") == "attempt" for event in events):
        summary += ". The supervisor of the attempt ended with it"
    ended_by = f"signal {facts.signal}" if facts.signal else f"exit code {facts.exit_code}"
    text = f"the job's state is {facts.state} by {ended_by}, and no end of its attempt is recorded"
    return Verdict(
        cause="killed",
        summary=summary,
        time=facts.end,
        signal=facts.signal,
        exit_code=facts.exit_code,
        confidence=0.85,
        blame="unknown",
        evidence=(EvidenceLine(rank=None, file="", line=None, text=text),),
        advice="see who sent it: the kernel as memory ran out (dmesg on the first node), a person, or a "
        "clean-up script of the site; then submit it again",
    )
