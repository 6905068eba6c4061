"""What ended the job from outside: Slurm's word, a lost node, the node's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtslurm.diagnose.failure_context import CERTAIN, FailureContext, verdict_of
from dtslurm.diagnose.findings import node_of
from dtslurm.diagnose.reasons import RankEnd, Reason, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

_BY_STATE = {
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "OUT_OF_MEMORY": "host-out-of-memory",
}
_NO_OUTPUT_FILE = 53  # the signal that Slurm shows for it
FROM_OUTSIDE = ("time-limit", "preempted", "cancelled")


def outside(case: FailureContext) -> str | None:
    """Return what Slurm says ended the job, by its state or by its lines in the logs."""
    if case.facts.state in _BY_STATE:
        return _BY_STATE[case.facts.state]
    if case.facts.state == "COMPLETED":
        return None
    told = [one for one in _said(case) if one.role == "ended" and one.strength >= CERTAIN]
    if told:
        return told[0].cause
    asked = [event for event in case.findings.events if event.get("event") == "cancel"]
    if asked and not case.of_kind("cause"):
        return "cancelled"
    return None


def by_scheduler(cause: str, case: FailureContext) -> Verdict:
    """Return the verdict that Slurm's word makes."""
    facts = case.facts
    lines = _lines_of(case, cause)
    if cause == "node-failure":
        return node_failure(case, 0.95, lines)
    if cause == "host-out-of-memory":
        return memory(case, lines)
    if cause == "time-limit":
        limit = f" of {_span(facts.time_limit)}" if facts.time_limit else ""
        summary = f"the time limit{limit} was reached{_stalled(case)}"
        advice = (
            "ask for more by --time, or save checkpoints and go on in the next job (--signal-before warns)"
        )
        blame = "user"
    elif cause == "preempted":
        summary, blame = "a job of higher priority took the nodes", "site"
        advice = (
            "dtslurm resubmit JOB --from-checkpoint goes on from what was saved, and so does Slurm by itself "
            "where a run is submitted with --max-restarts or --requeue; or use a QOS that is not preempted"
        )
    else:
        who = facts.cancelled_by or ("dtslurm cancel" if _asked_to_cancel(case) else "")
        summary, blame = f"it was cancelled{f' by {who}' if who else ''}", "user"
        advice = "nothing failed; if it was not you, ask the site's support"
    return Verdict(
        cause=cause,
        summary=summary,
        time=facts.end or (int(case.stop) if case.stop else None),
        confidence=0.95,
        blame=blame,
        evidence=lines or state_line(case),
        advice=advice,
    )


def not_launched(case: FailureContext) -> Verdict | None:
    """Return the verdict where Slurm could not even start the script.

    Its exit code is then 0:53; Slurm 20.11 often tells exit code 1, and only the missing output says why.
    """
    facts = case.facts
    if facts.reason != "JobLaunchFailure" and facts.signal != _NO_OUTPUT_FILE and not _never_began(case):
        return None
    where = f" on {facts.nodelist}" if facts.nodelist else ""
    return Verdict(
        cause="unknown",
        summary=f"Slurm could not start the script{where}: most often the folder of its output file is "
        "missing or cannot be written there",
        node=facts.nodelist or None,
        time=facts.end,
        confidence=0.6,
        blame="site",
        evidence=state_line(case),
        advice="see that the run directory is there and mounted on that node, then submit it again",
    )


def _never_began(case: FailureContext) -> bool:
    """Tell whether a failed job left nothing at all in a run directory that is still there."""
    events = {event.get("event") for event in case.findings.events}
    logs = [*case.findings.others, *(end.rank.log for end in case.ends)]
    left = any(log.mtime is not None for log in logs) or any(end.rank.recorded for end in case.ends)
    return case.facts.state == "FAILED" and "submitted" in events and "started" not in events and not left


def _asked_to_cancel(case: FailureContext) -> bool:
    return any(event.get("event") == "cancel" for event in case.findings.events)


def _stalled(case: FailureContext) -> str:
    """Return a remark on a job that wrote nothing for long before it ended."""
    times = [end.rank.log.mtime for end in case.ends if end.rank.log.mtime is not None]
    if not times or case.facts.end is None:
        return ""
    silence = case.facts.end - max(times)
    if silence < max(900.0, 0.25 * (case.facts.time_limit or 0)):
        return ""
    first = min(
        (end for end in case.ends if end.rank.log.mtime is not None), key=lambda end: end.rank.log.mtime or 0
    )
    return (
        f"; no rank wrote anything in the last {_span(int(silence))}, so it had hung;"
        f" rank {first.rank.rank} went quiet first"
    )


def _span(seconds: int | None) -> str:
    minutes = (seconds or 0) // 60
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def state_line(case: FailureContext) -> tuple[EvidenceLine, ...]:
    """Return the job's state and reason as a line of evidence."""
    reason = f", reason {case.facts.reason}" if case.facts.reason not in ("", "None") else ""
    text = f"the job's state is {case.facts.state}{reason}"
    return (EvidenceLine(rank=None, file="", line=None, text=text),)


def _lines_of(case: FailureContext, cause: str) -> tuple[EvidenceLine, ...]:
    lines = [line for reason in _said(case) if reason.cause == cause for line in reason.lines]
    return tuple(dict.fromkeys(lines))[:3]


def _said(case: FailureContext) -> Iterator[Reason]:
    """Yield what launchers say, and what Slurm wrote into the output of ranks that it ended."""
    yield from (reason for _, reason in case.others)
    yield from (
        one for one in (end.reason for end in case.of_kind("ended")) if one and one.strength >= CERTAIN
    )


def node_failure(case: FailureContext, confidence: float, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict that a node was lost."""
    own = (end.reason for end in case.of_kind("cause") if end.reason)
    said = [reason for reason in (*_said(case), *own) if reason.cause == "node-failure"]
    naming = next((reason for reason in said if reason.groups.get("failed")), None)
    node = naming.groups["failed"] if naming else _without_a_last_word(case, said)
    if naming:
        lines = tuple(dict.fromkeys((*naming.lines, *lines)))
    silent = [end for end in case.of_kind("silent") if end.rank.host == node and node]
    rank = (
        silent[0].rank
        if silent
        else next((end.rank for end in case.ends if end.rank.host == node and node), None)
    )
    without = f" with --exclude {node}" if node else ""
    return Verdict(
        cause="node-failure",
        summary=f"node {node} went down" if node else "a node went down",
        rank=rank.rank if rank else None,
        local_rank=rank.local_rank if rank else None,
        node=node,
        time=int(rank.log.mtime) if rank and rank.log.mtime else case.facts.end,
        confidence=confidence,
        blame="node",
        evidence=lines or state_line(case),
        advice=f"submit it again{without}; the node is the site's to repair",
    )


def _without_a_last_word(case: FailureContext, said: Sequence[Reason]) -> str | None:
    """Return the one node that left no end of any rank, of several the one that a line names."""
    alive = {end.rank.host for end in case.ends if end.rank.exit_code is not None}
    dead = {end.rank.host for end in case.ends if end.rank.host} - alive
    if len(dead) == 1:
        return dead.pop()
    named = (reason.groups.get("node") for reason in said)
    return next((node for node in named if node and node not in alive), None)


# ---- Host memory ----


def with_host_memory(case: FailureContext) -> tuple[RankEnd, ...]:
    """Give ranks that were killed the reason that Slurm gives for their node, or for the job."""
    nodes: dict[str, Reason] = {}
    for log, said in case.others:
        if said.cause == "host-out-of-memory":
            node = said.groups.get("node") or node_of(log, case.findings.ranks)
            nodes.setdefault(node, said)
    if not nodes and case.facts.state != "OUT_OF_MEMORY":
        return case.ends
    ends = []
    for end in case.ends:
        reason: Reason | None = nodes.get(end.rank.host) or nodes.get("")
        if reason is None and case.facts.state == "OUT_OF_MEMORY":
            reason = memory_reason(case)
        if (
            reason is not None
            and signal_of(end.rank) == 9
            and end.kind in ("weak", "cause")
            and _weaker(end, reason)
        ):
            ends.append(RankEnd(end.rank, "cause", reason))
        else:
            ends.append(end)
    return tuple(ends)


def _weaker(end: RankEnd, reason: Reason) -> bool:
    return end.reason is None or end.reason.strength < reason.strength


def memory_reason(case: FailureContext) -> Reason:
    """Return the reason of a process that the kernel killed for want of memory."""
    return Reason(
        cause="host-out-of-memory",
        role="cause",
        strength=88,
        summary="the node's memory limit of the job was reached and the kernel killed a process",
        advice="ask for more by --mem, or use fewer data-loader workers or a smaller prefetch",
        blame="user",
        lines=state_line(case),
    )


def memory(case: FailureContext, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict that a node's memory ran out, though no rank is known to have been killed."""
    reason = memory_reason(case)
    silent = case.of_kind("silent")
    rank = silent[0].rank if len(silent) == 1 else None
    return verdict_of(rank, replace(reason, lines=lines or reason.lines), 0.8, case)
