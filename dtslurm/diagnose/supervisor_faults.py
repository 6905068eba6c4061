"""What was recorded of a supervisor that was stopped, or that was killed with its batch script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtslurm.diagnose.case import CERTAIN, Case
from dtslurm.model.diagnosis import EvidenceLine, Verdict

BATCH_KILLED = "SIGKILL ended the batch script before any rank had failed; Slurm then ended the ranks"
SUPERVISOR_STOPPED = "SUPERVISOR STOPPED"
_SIGKILL = 9
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


def batch_script_killed(case: Case) -> Verdict | None:
    """Return the verdict that the batch script was killed, None where Slurm or the run tells otherwise.

    Slurm shows signal 9 for the job then, and neither the script nor its supervisor recorded an end.
    """
    facts, events = case.facts, case.findings.events
    told = [event for event in events if event.get("event") in {"started", "ended"}]
    if facts.state != "FAILED" or facts.signal != _SIGKILL or not told or told[-1].get("event") != "started":
        return None
    if any(one.get("event") == "attempt_ended" and one.get("attempt") == facts.attempt for one in events):
        return None
    if any(end.reason and end.reason.strength >= CERTAIN for end in case.of_kind("cause")):
        return None
    supervised = any(event.get("event") == "attempt" for event in events)
    also = " The supervisor of the attempt ended with it." if supervised else ""
    text = f"the job's state is {facts.state} by signal {_SIGKILL}, and its batch script recorded no end"
    return Verdict(
        cause="killed",
        summary=f"{BATCH_KILLED}.{also}",
        time=facts.end,
        signal=_SIGKILL,
        confidence=0.85,
        blame="unknown",
        evidence=(EvidenceLine(rank=None, file="", line=None, text=text),),
        advice="see who sent it: the kernel as memory ran out (dmesg on the first node), a person, or a "
        "clean-up script of the site; then submit it again",
    )
