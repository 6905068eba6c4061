"""Verdicts on jobs that ended for a reason outside of the ranks: Slurm, a lost node, the node's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtslurm.diagnose.failure_context import CERTAIN, FailureContext, verdict_of
from dtslurm.diagnose.findings import Findings, node_of
from dtslurm.diagnose.reasons import TERMINATION_SIGNALS, RankEnd, Reason, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Verdict

_CAUSE_BY_STATE = {
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "OUT_OF_MEMORY": "host-out-of-memory",
}
_NO_OUTPUT_FILE_SIGNAL = 53  # the signal that Slurm reports if it cannot open the output file
_SURE = 0.7  # a verdict of a lower confidence is a guess
FROM_OUTSIDE = ("time-limit", "preempted", "cancelled")


def find_external_cause(context: FailureContext) -> str | None:
    """Return the external cause according to Slurm's job state or Slurm's lines in the logs, or None."""
    if context.facts.state in _CAUSE_BY_STATE:
        return _CAUSE_BY_STATE[context.facts.state]
    if context.facts.state == "COMPLETED":
        return None
    if context.facts.preempted_at is not None:
        return "preempted"
    end_reasons = [
        reason
        for reason in _launcher_and_slurm_reasons(context)
        if reason.role == "ended" and reason.strength >= CERTAIN
    ]
    if end_reasons:
        return end_reasons[0].cause
    cancel_events = [event for event in context.findings.events if event.get("event") == "cancel"]
    if cancel_events and not context.of_kind("cause"):
        return "cancelled"
    return None


def may_be_preempted(verdict: Verdict, facts: JobFacts, findings: Findings) -> bool:
    """Return whether a signal from outside may have ended a job whose state does not show a preemption.

    If ranks end by themselves in the grace time of a preemption, Slurm before 24.05 ends the job as FAILED.
    """
    if facts.state != "FAILED" or facts.preempted_at is not None:
        return False
    is_guess = verdict.confidence < _SURE
    return verdict.cause == "killed" or (
        is_guess and any(signal_of(rank) in TERMINATION_SIGNALS for rank in findings.ranks)
    )


def by_scheduler(cause: str, context: FailureContext) -> Verdict:
    """Return the verdict for a cause that Slurm reports."""
    facts = context.facts
    lines = _lines_for_cause(context, cause)
    if cause == "node-failure":
        return node_failure(context, 0.95, lines)
    if cause == "host-out-of-memory":
        return memory(context, lines)
    if cause == "time-limit":
        limit = f" of {_format_duration(facts.time_limit)}" if facts.time_limit else ""
        summary = f"the time limit{limit} was reached{_describe_stall(context)}"
        advice = (
            "request more time with --time, or save checkpoints (--signal-before sends a signal before the "
            "limit) and continue after the limit with --total-time DURATION"
        )
        blame = "user"
    elif cause == "preempted":
        summary, blame = "the job was preempted by a job of higher priority", "site"
        # If the ranks end by themselves in the grace time, Slurm before 24.05 ends the job as FAILED.
        requeued_by = "--max-restarts" if facts.state == "FAILED" else "--max-restarts or --requeue"
        advice = (
            "dtslurm resubmit JOB --from-checkpoint continues from the last checkpoint; a run that was "
            f"submitted with {requeued_by} is requeued; or use a QOS that is not preempted"
        )
    else:
        canceller = facts.cancelled_by or ("dtslurm cancel" if _was_cancelled(context) else "")
        summary, blame = f"the job was cancelled{f' by {canceller}' if canceller else ''}", "user"
        advice = "no failure occurred; if you did not cancel the job, contact the cluster's support"
    return Verdict(
        cause=cause,
        summary=summary,
        time=facts.end or (int(context.stop) if context.stop else None),
        confidence=0.95,
        blame=blame,
        evidence=lines or state_line(context),
        advice=advice,
    )


def not_launched(context: FailureContext) -> Verdict | None:
    """Return the verdict that Slurm could not start the script, or None.

    The job's exit code is then 0:53. Slurm 20.11 often reports exit code 1, and only the missing output shows
    the cause.
    """
    facts = context.facts
    if (
        facts.reason != "JobLaunchFailure"
        and facts.signal != _NO_OUTPUT_FILE_SIGNAL
        and not _left_no_output(context)
    ):
        return None
    location = f" on {facts.nodelist}" if facts.nodelist else ""
    return Verdict(
        cause="unknown",
        summary=f"Slurm could not start the script{location}: the usual cause is that the folder of the "
        "output file is missing or not writable on the node",
        node=facts.nodelist or None,
        time=facts.end,
        confidence=0.6,
        blame="site",
        evidence=state_line(context),
        advice="check that the run directory exists and is mounted on that node, then submit the run again",
    )


def _left_no_output(context: FailureContext) -> bool:
    """Return whether a failed job left no output at all, although its run directory still exists."""
    events = {event.get("event") for event in context.findings.events}
    logs = [*context.findings.job_logs, *(end.rank.log for end in context.ends)]
    has_output = any(log.mtime is not None for log in logs) or any(end.rank.recorded for end in context.ends)
    return (
        context.facts.state == "FAILED"
        and "submitted" in events
        and "started" not in events
        and not has_output
    )


def _was_cancelled(context: FailureContext) -> bool:
    return any(event.get("event") == "cancel" for event in context.findings.events)


def _describe_stall(context: FailureContext) -> str:
    """Return a remark if the job wrote nothing for a long time before it ended, otherwise ""."""
    times = [end.rank.log.mtime for end in context.ends if end.rank.log.mtime is not None]
    if not times or context.facts.end is None:
        return ""
    silence_s = context.facts.end - max(times)
    if silence_s < max(900.0, 0.25 * (context.facts.time_limit or 0)):
        return ""
    first_silent = min(
        (end for end in context.ends if end.rank.log.mtime is not None),
        key=lambda end: end.rank.log.mtime or 0,
    )
    return (
        f"; no rank wrote output in the last {_format_duration(int(silence_s))}, so the job hung; "
        f"the output of rank {first_silent.rank.rank} stopped first"
    )


def _format_duration(seconds: int | None) -> str:
    minutes = (seconds or 0) // 60
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def state_line(context: FailureContext) -> tuple[EvidenceLine, ...]:
    """Return the job's state and reason as a line of evidence."""
    reason = f", reason {context.facts.reason}" if context.facts.reason not in ("", "None") else ""
    text = f"the job's state is {context.facts.state}{reason}"
    if context.facts.preempted_at is not None:
        text += ", and scontrol show job shows its PreemptTime"
    return (EvidenceLine(rank=None, file="", line=None, text=text),)


def _lines_for_cause(context: FailureContext, cause: str) -> tuple[EvidenceLine, ...]:
    lines = [
        line
        for reason in _launcher_and_slurm_reasons(context)
        if reason.cause == cause
        for line in reason.lines
    ]
    return tuple(dict.fromkeys(lines))[:3]


def _launcher_and_slurm_reasons(context: FailureContext) -> Iterator[Reason]:
    """Yield the reasons in launchers' logs, and those that Slurm wrote to the output of ranks it ended."""
    yield from (reason for _, reason in context.job_reasons)
    yield from (
        reason
        for reason in (end.reason for end in context.of_kind("ended"))
        if reason and reason.strength >= CERTAIN
    )


def node_failure(context: FailureContext, confidence: float, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict that a node was lost."""
    rank_reasons = (end.reason for end in context.of_kind("cause") if end.reason)
    node_reasons = [
        reason
        for reason in (*_launcher_and_slurm_reasons(context), *rank_reasons)
        if reason.cause == "node-failure"
    ]
    naming_reason = next((reason for reason in node_reasons if reason.groups.get("failed")), None)
    node = naming_reason.groups["failed"] if naming_reason else _find_lost_node(context, node_reasons)
    if naming_reason:
        lines = tuple(dict.fromkeys((*naming_reason.lines, *lines)))
    silent_ends = [end for end in context.of_kind("silent") if end.rank.host == node and node]
    rank = (
        silent_ends[0].rank
        if silent_ends
        else next((end.rank for end in context.ends if end.rank.host == node and node), None)
    )
    exclude_option = f" with --exclude {node}" if node else ""
    return Verdict(
        cause="node-failure",
        summary=f"node {node} failed" if node else "a node failed",
        rank=rank.rank if rank else None,
        local_rank=rank.local_rank if rank else None,
        node=node,
        time=int(rank.log.mtime) if rank and rank.log.mtime else context.facts.end,
        confidence=confidence,
        blame="node",
        evidence=lines or state_line(context),
        advice=f"submit the run again{exclude_option}; the cluster's support must repair the node",
    )


def _find_lost_node(context: FailureContext, reasons: Sequence[Reason]) -> str | None:
    """Return the only node of which no rank recorded an end.

    If there are several, return the node that a log line names, or None.
    """
    live_hosts = {end.rank.host for end in context.ends if end.rank.exit_code is not None}
    lost_hosts = {end.rank.host for end in context.ends if end.rank.host} - live_hosts
    if len(lost_hosts) == 1:
        return lost_hosts.pop()
    named_nodes = (reason.groups.get("node") for reason in reasons)
    return next((node for node in named_nodes if node and node not in live_hosts), None)


# ---- Host memory ----


def with_host_memory(context: FailureContext) -> tuple[RankEnd, ...]:
    """Return the ends, with Slurm's out-of-memory reason for ranks that SIGKILL ended on the named node.

    If no node is named or the job's state is OUT_OF_MEMORY, such ranks on all nodes get the reason.
    """
    reason_by_node: dict[str, Reason] = {}
    for log, log_reason in context.job_reasons:
        if log_reason.cause == "host-out-of-memory":
            node = log_reason.groups.get("node") or node_of(log, context.findings.ranks)
            reason_by_node.setdefault(node, log_reason)
    if not reason_by_node and context.facts.state != "OUT_OF_MEMORY":
        return context.ends
    ends = []
    for end in context.ends:
        reason: Reason | None = reason_by_node.get(end.rank.host) or reason_by_node.get("")
        if reason is None and context.facts.state == "OUT_OF_MEMORY":
            reason = memory_reason(context)
        if (
            reason is not None
            and signal_of(end.rank) == 9
            and end.kind in ("weak", "cause")
            and _is_weaker(end, reason)
        ):
            ends.append(RankEnd(end.rank, "cause", reason))
        else:
            ends.append(end)
    return tuple(ends)


def _is_weaker(end: RankEnd, reason: Reason) -> bool:
    return end.reason is None or end.reason.strength < reason.strength


def memory_reason(context: FailureContext) -> Reason:
    """Return the reason of a process that the kernel killed because memory ran out."""
    return Reason(
        cause="host-out-of-memory",
        role="cause",
        strength=88,
        summary="the job reached its memory limit on the node, and the kernel killed a process",
        advice="request more memory with --mem, or use fewer data-loader workers or a smaller prefetch",
        blame="user",
        lines=state_line(context),
    )


def memory(context: FailureContext, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict that a node's memory ran out, if no rank is known to have been killed."""
    reason = memory_reason(context)
    silent_ends = context.of_kind("silent")
    rank = silent_ends[0].rank if len(silent_ends) == 1 else None
    return verdict_of(rank, replace(reason, lines=lines or reason.lines), 0.8, context)
