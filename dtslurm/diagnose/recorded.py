"""Verdicts from the run's own records of an attempt's end: exit codes of its ranks, and supervisor events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtslurm.diagnose import live
from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.diagnose.places import format_frame, kind_of, words
from dtslurm.diagnose.supervisor_events import (
    ROLE_FAILURE,
    describe_role_failure,
    find_role_failure,
    read_text,
)
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Verdict
from dtslurm.model.runs.live import RankLook
from dtslurm.worker.lib.json_records import finite_number, whole_number

# Causes that the supervisor observes while they happen; the ranks' records only show that they were ended.
_OBSERVED_CAUSES = {"hang", "node-failure"}
_UNEXPLAINED = {"", "done", "unknown", "exit-code", "killed"}
_ADVICE = {
    "hang": (
        "check in the log what that rank did at that time; while a run hangs, use dtslurm diagnose --live"
    ),
    "node-failure": (
        "submit the run again with --exclude and that node; the cluster's support must repair the node"
    ),
    "time-limit": (
        "use --total-time DURATION to continue after the time limit, or request more time with --time"
    ),
}

_STACK_ADVICE = (
    "check this place in the code: find out why only this rank waited here; the complete stack is in "
    "ranks/{attempt}/stacks/{node}.txt of the run directory"
)
_SHOWN_FRAMES = 4

_ROLE_BLAME = {
    "bad-arguments": "user",
    "command-not-found": "user",
    "gpu-out-of-memory": "code",
    "host-out-of-memory": "code",
    "python-exception": "code",
    "import-error": "user",
    "node-failure": "node",
    "gpu-fault": "node",
}
_ROLE_ADVICE = {
    "bad-arguments": "correct the arguments of the role's command in the job file",
    "command-not-found": "install the program, or name its path or its environment in the role",
    "gpu-out-of-memory": "reduce the memory that the server reserves, or give it more GPUs",
    "not-ready": "raise ready.within if the server needs more time, or check its readiness path and port",
    "unresponsive": "raise ready.silence if the server may be busy for longer",
    "node-failure": "give the run a spare node with --spare-nodes 1",
}


def find_observed_verdict(context: FailureContext) -> Verdict | None:
    """Return the verdict of the supervisor that ended the attempt, or None if it did not end it."""
    event = _find_end_event(context)
    return _verdict_from_event(event, context) if event.get("cause") in _OBSERVED_CAUSES else None


def find_recorded_verdict(context: FailureContext) -> Verdict | None:
    """Return the verdict that the supervisor recorded, or None if it recorded no explanation."""
    event = _find_end_event(context)
    if str(event.get("cause") or "") in _UNEXPLAINED:
        return None
    verdict = _verdict_from_event(event, context)
    continuation = _find_continuation(context)
    if not continuation:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}; {continuation}", advice="")


def _find_continuation(context: FailureContext) -> str:
    """Return how the run continued after the attempt in a new start of the job; empty if it did not."""
    methods = [
        event.get("by")
        for event in context.findings.events
        if event.get("event") == "onward"
        and event.get("attempt") == context.facts.attempt
        and event.get("done")
    ]
    if not methods:
        return ""
    return "the job was requeued" if methods[-1] == "requeue" else "the next job was queued"


def _find_end_event(context: FailureContext) -> Mapping[str, Any]:
    """Return the event of the attempt's end, or a hang event if no end was recorded."""
    hang_event: Mapping[str, Any] = {}
    for event in context.findings.events:
        if event.get("attempt") != context.facts.attempt:
            continue
        if event.get("event") == "attempt_ended":
            return event
        if event.get("event") == "hang":
            hang_event = {**event, "cause": "hang"}
    return hang_event


def _verdict_from_event(event: Mapping[str, Any], context: FailureContext) -> Verdict:
    rank, node = whole_number(event.get("rank")), event.get("node")
    time = finite_number(event.get("time"))
    summary, cause = str(event.get("summary") or ""), str(event["cause"])
    rank_evidence = (
        context.findings.ranks[rank] if rank is not None and 0 <= rank < len(context.ends) else None
    )
    lines = [EvidenceLine(rank=None, file="events.jsonl", line=None, text=f"{cause}: {summary}")]
    advice = _ADVICE.get(cause, "")
    looks = _usable_stacks(context) if cause == "hang" else []
    look = next((look for look in looks if look.rank == rank), None) if rank_evidence is not None else None
    if look is not None:
        summary = f"{summary}; rank {look.rank} was {words(look, kind_of(look))}"
        frames = ", ".join(format_frame(frame) for frame in look.frames[:_SHOWN_FRAMES])
        text = f"rank {look.rank}, innermost frame first: {frames}"
        lines.append(EvidenceLine(rank=rank, file=f"stacks/{look.host}.txt", line=None, text=text))
        advice = _STACK_ADVICE.format(attempt=context.facts.attempt, node=look.host)
    elif rank is None and len(looks) == len(context.ends):
        hang = live.judge(looks, len(looks))
        if hang.cause == "hang":
            summary, advice = (
                f"{summary}; according to the stacks saved at that time, {hang.summary}",
                hang.advice or advice,
            )
    if rank_evidence is not None:
        lines += [
            EvidenceLine(rank=rank, file=rank_evidence.log.file, line=None, text=text)
            for text in rank_evidence.log.tail[-2:]
        ]
    return Verdict(
        cause=cause,
        summary=summary or f"the supervisor found a {cause}",
        rank=rank_evidence.rank if rank_evidence else None,
        local_rank=rank_evidence.local_rank if rank_evidence else None,
        node=str(node) if node else (rank_evidence.host or None) if rank_evidence else None,
        time=None if time is None else int(time),
        confidence=0.85 if rank_evidence or cause not in _OBSERVED_CAUSES or node else 0.75,
        blame=str(event.get("blame") or "unknown"),
        evidence=tuple(lines),
        advice=advice,
    )


def _usable_stacks(context: FailureContext) -> list[RankLook]:
    """Return the ranks whose Python stack was saved when the supervisor found the hang."""
    return [look for look in context.findings.stacks if look.frames and look.by in ("py-spy", "signal")]


def has_requested_requeue(context: FailureContext) -> bool:
    """Return whether the first rank that did not end with 0 saved and ended with 85.

    Failures of other ranks are consequences: a rank that failed before would have been recorded instead.
    """
    first = context.findings.first
    return first is not None and first[1] == WANTS_REQUEUE


def judge_requeue_request(context: FailureContext) -> Verdict | None:
    """Return the verdict on ranks of which the first ended with 85, or None if there was no such rank."""
    if not has_requested_requeue(context):
        return None
    return find_recorded_verdict(context) or judge_checkpointed_ranks(context)


def judge_checkpointed_ranks(context: FailureContext) -> Verdict | None:
    """Return the verdict that ranks saved a checkpoint and requested a requeue, or None if none did."""
    checkpointed_ranks = [end.rank for end in context.ends if end.rank.exit_code == WANTS_REQUEUE]
    if not checkpointed_ranks or not context.facts.over:
        return None
    count = (
        "every rank"
        if len(checkpointed_ranks) == len(context.ends)
        else f"{len(checkpointed_ranks)} of {len(context.ends)} ranks"
    )
    return Verdict(
        cause="checkpointed",
        summary=f"no failure: {count} saved a checkpoint and ended with 85, which requests a requeue",
        time=context.facts.end,
        exit_code=WANTS_REQUEUE,
        confidence=0.9,
        blame="user",
        evidence=tuple(
            EvidenceLine(rank=rank.rank, file=rank.log.file, line=None, text=text)
            for rank in checkpointed_ranks[:1]
            for text in rank.log.tail[-3:]
        ),
        advice="dtslurm resubmit JOB --from-checkpoint continues from the last checkpoint; a run submitted "
        "with --max-restarts continues automatically",
    )


def judge_role_failure(events: Iterable[Mapping[str, Any]], facts: JobFacts) -> Verdict | None:
    """Return the verdict on a run that ended because a role could not come back; None for another end."""
    own_events = [event for event in events if event.get("attempt") in {None, facts.attempt}]
    event = find_role_failure(own_events)
    if event is None:
        return None
    role, cause, reason = (read_text(event.get(key)) for key in ("role", "cause", "reason"))
    file = read_text(event.get("log"))
    lines = event.get("lines")
    advice = _ROLE_ADVICE.get(cause, "read the log of the instance")
    log_advice = f"; dtslurm logs JOB --role {role} shows its output" if role else ""
    return Verdict(
        cause=ROLE_FAILURE,
        summary=describe_role_failure(event) + (f" ({reason})" if reason else ""),
        node=read_text(event.get("node")) or None,
        time=int(time) if isinstance(time := event.get("time"), int | float) else None,
        confidence=0.95,
        blame=_ROLE_BLAME.get(cause, "unknown"),
        evidence=tuple(
            EvidenceLine(rank=None, file=file, line=None, text=read_text(line))
            for line in (lines if isinstance(lines, list) else [])[-5:]
        ),
        advice=advice + log_advice,
    )
