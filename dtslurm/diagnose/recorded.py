"""What the run itself recorded of an attempt's end: its ranks saved, or the supervisor saw why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

# What the supervisor sees as it happens; afterwards the ranks only tell that they were ended.
_SEEN = {"hang", "node-failure"}
_NO_WORD = {"", "done", "unknown", "exit-code", "killed"}
_ADVICE = {
    "hang": "look at what that rank did then, by its log; dtslurm diagnose --live tells it while a run hangs",
    "node-failure": "submit it again with --exclude of that node; the node is the site's to repair",
    "time-limit": "--total-time DURATION goes on after the time limit; else ask for more by --time",
}


def seen_by_supervisor(case: FailureContext) -> Verdict | None:
    """Return the verdict that the supervisor made as it ended the attempt, None where it did not end it."""
    event = _own(case)
    return _verdict(event, case) if event.get("cause") in _SEEN else None


def told_by_supervisor(case: FailureContext) -> Verdict | None:
    """Return the verdict that the supervisor recorded, None where it recorded nothing that says why."""
    event = _own(case)
    return None if str(event.get("cause") or "") in _NO_WORD else _verdict(event, case)


def _own(case: FailureContext) -> Mapping[str, Any]:
    """Return how the attempt ended by its own events; a hang alone where nobody could tell the end."""
    found: Mapping[str, Any] = {}
    for event in case.findings.events:
        if event.get("attempt") != case.facts.attempt:
            continue
        if event.get("event") == "attempt_ended":
            return event
        if event.get("event") == "hang":
            found = {**event, "cause": "hang"}
    return found


def _verdict(event: Mapping[str, Any], case: FailureContext) -> Verdict:
    rank, node, time = event.get("rank"), event.get("node"), event.get("time")
    summary, cause = str(event.get("summary") or ""), str(event["cause"])
    own = case.findings.ranks[rank] if isinstance(rank, int) and 0 <= rank < len(case.ends) else None
    lines = [EvidenceLine(rank=None, file="events.jsonl", line=None, text=f"{cause}: {summary}")]
    if own is not None:
        lines += [
            EvidenceLine(rank=rank, file=own.log.file, line=None, text=text) for text in own.log.tail[-2:]
        ]
    return Verdict(
        cause=cause,
        summary=summary or f"the supervisor found a {cause}",
        rank=own.rank if own else None,
        local_rank=own.local_rank if own else None,
        node=str(node) if node else (own.host or None) if own else None,
        time=int(time) if isinstance(time, (int, float)) else None,
        confidence=0.85 if own or cause not in _SEEN or node else 0.75,
        blame=str(event.get("blame") or "unknown"),
        evidence=tuple(lines),
        advice=_ADVICE.get(cause, ""),
    )


def checkpointed(case: FailureContext) -> Verdict | None:
    """Return the verdict that ranks saved and asked for another start, None where none did."""
    saved = [end.rank for end in case.ends if end.rank.exit_code == WANTS_REQUEUE]
    if not saved or not case.facts.over:
        return None
    count = "every rank" if len(saved) == len(case.ends) else f"{len(saved)} of {len(case.ends)} ranks"
    return Verdict(
        cause="checkpointed",
        summary=f"nothing failed: {count} saved and ended with 85, which asks for another start",
        time=case.facts.end,
        exit_code=WANTS_REQUEUE,
        confidence=0.9,
        blame="user",
        evidence=tuple(
            EvidenceLine(rank=rank.rank, file=rank.log.file, line=None, text=text)
            for rank in saved[:1]
            for text in rank.log.tail[-3:]
        ),
        advice="dtslurm resubmit JOB --from-checkpoint goes on from what was saved; "
        "submitted with --max-restarts, a run does so by itself",
    )
