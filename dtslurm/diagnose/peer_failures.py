"""Verdicts on ranks that only report failures of other ranks: timeouts and lost connections."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose import missing_rank
from dtslurm.diagnose.external_causes import node_failure
from dtslurm.diagnose.failure_context import (
    FailureContext,
    find_first_failure,
    judge_rank,
    sample,
    verdict_of,
    with_rank,
)
from dtslurm.diagnose.reasons import RankEnd, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict


def judge_peer_failures(context: FailureContext) -> Verdict | None:
    """Return the verdict on ranks that waited for or lost other ranks, or None if no rank reports that."""
    timeouts, disconnected_ends, weak_ends = (
        context.of_kind("timeout"),
        context.of_kind("lost-peer"),
        context.of_kind("weak"),
    )
    if not timeouts and not disconnected_ends:
        return None
    ended_early = _find_ended_before_timeout(weak_ends, timeouts, context) if timeouts else weak_ends
    if ended_early:
        return judge_rank(find_first_weak_end(ended_early, context), context)
    node = _find_vanished_node(context)
    if node is not None:
        return node_failure(context, 0.65, sample(timeouts + disconnected_ends))
    if timeouts:
        return _judge_timeout(timeouts, context)
    return _judge_lost_connection(disconnected_ends, context)


def _find_ended_before_timeout(
    weak_ends: list[RankEnd], timeouts: list[RankEnd], context: FailureContext
) -> list[RankEnd]:
    """Return the ranks that ended without a message before other ranks timed out."""
    first_timeout = min((end.rank.ended for end in timeouts if end.rank.ended is not None), default=None)
    recorded_first = context.findings.first
    return [
        end
        for end in weak_ends
        if (recorded_first is not None and end.rank.rank == recorded_first[0])
        or first_timeout is None
        or (end.rank.ended is not None and end.rank.ended < first_timeout - context.slack)
    ]


def find_first_weak_end(ends: list[RankEnd], context: FailureContext) -> RankEnd:
    """Return the rank that ended first among those without a message.

    A rank that a signal ended takes precedence over one with an exit code. SIGKILL after the first recorded
    failure does not count as a signal: launchers send it to ranks that ignore SIGTERM.
    """
    recorded_first = context.findings.first
    first_end = next(
        (end.rank.ended for end in ends if recorded_first and end.rank.rank == recorded_first[0]), None
    )
    signalled_ends = [
        end
        for end in ends
        if (number := signal_of(end.rank)) is not None
        and not (
            number == 9
            and first_end is not None
            and end.rank.ended is not None
            and end.rank.ended > first_end
        )
    ]
    return find_first_failure(signalled_ends or ends, context)


def _find_vanished_node(context: FailureContext) -> str | None:
    """Return the node of which no rank recorded an end while the ranks of all other nodes did."""
    silent_ends = context.of_kind("silent")
    hosts = {end.rank.host for end in silent_ends}
    if len(hosts) != 1 or not context.facts.over:
        return None
    host = hosts.pop()
    node_ends = [end for end in context.ends if end.rank.host == host]
    if not host or len(node_ends) != len(silent_ends) or len(node_ends) == len(context.ends):
        return None
    return host if len(node_ends) > 1 or context.of_kind("lost-peer") else None


def _judge_timeout(timeouts: list[RankEnd], context: FailureContext) -> Verdict:
    missing = missing_rank.find(context.ends, context.findings.dumps)
    timeout_reason = timeouts[0].reason
    assert timeout_reason is not None  # noqa: S101 - a timeout has its line
    if missing is None:
        unknown_summary = (
            f"{len(timeouts)} ranks waited in a collective that did not end, and no rank is known to be late"
        )
        return replace(verdict_of(None, timeout_reason, 0.5, context), summary=unknown_summary)
    end = next(end for end in context.ends if end.rank.rank == missing.rank)
    missing_rank_lines = tuple(
        EvidenceLine(rank=missing.rank, file=end.rank.log.file, line=None, text=text)
        for text in end.rank.log.tail[-2:]
    )
    generic_summary = "a collective did not complete in time"
    detail = f" ({timeout_reason.summary})" if timeout_reason.summary not in ("", generic_summary) else ""
    waiting_ranks = f"{len(timeouts)} rank{'s' if len(timeouts) > 1 else ''}"
    summary = f"{waiting_ranks} waited for rank {missing.rank} in a collective{detail}: {missing.why}"
    verdict = verdict_of(end.rank, timeout_reason, missing.confidence, context)
    advice = (
        f"check what rank {missing.rank} did at that time: its log, a slow read, a branch that other "
        "ranks did not take"
    )
    return replace(verdict, summary=summary, advice=advice, evidence=(*missing_rank_lines, *sample(timeouts)))


def _judge_lost_connection(disconnected_ends: list[RankEnd], context: FailureContext) -> Verdict:
    """Return the verdict on ranks that lost a connection without any rank reporting why."""
    strongest_reason = max(
        (end.reason for end in disconnected_ends if end.reason), key=lambda reason: reason.strength
    )
    silent_ends, exited = context.of_kind("silent"), context.of_kind("fine")
    if strongest_reason.cause == "link-down":
        return replace(
            verdict_of(find_first_failure(disconnected_ends, context).rank, strongest_reason, 0.65, context),
            evidence=sample(disconnected_ends),
        )
    if len(silent_ends) == 1 and context.facts.over:
        summary = "it ended without a record while other ranks lost their connection to it"
        verdict = Verdict(
            cause="killed", summary=summary, advice="check the memory and the kernel log of that node"
        )
        return with_rank(verdict, silent_ends[0].rank, 0.5, sample(disconnected_ends))
    if exited and len(exited) < len(context.ends) / 2:
        rank = min(exited, key=lambda end: end.rank.ended or 0).rank
        code = rank.exit_code
        summary = (
            f"rank {rank.rank} ended with exit code {code} while other ranks still exchanged data with it"
        )
        advice = "all ranks must take the same number of steps; see Join of torch.distributed"
        verdict = Verdict(cause="collective-timeout", summary=summary, blame="code", advice=advice)
        return with_rank(verdict, rank, 0.7, sample(disconnected_ends))
    ended_ends = context.of_kind("ended")
    rank = (
        find_first_failure(ended_ends, context)
        if len(ended_ends) == 1
        else find_first_failure(disconnected_ends, context)
    ).rank
    return replace(
        verdict_of(rank, strongest_reason, 0.35, context),
        summary="ranks lost the connection to each other, and no rank reports a cause",
    )
