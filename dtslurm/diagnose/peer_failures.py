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


def judge_peer_failures(case: FailureContext) -> Verdict | None:
    """Return the verdict on ranks that waited for or lost other ranks, or None if no rank reports that."""
    timeouts, lost, weak = case.of_kind("timeout"), case.of_kind("lost-peer"), case.of_kind("weak")
    if not timeouts and not lost:
        return None
    ended_early = _find_ended_before_timeout(weak, timeouts, case) if timeouts else weak
    if ended_early:
        return judge_rank(first_weak(ended_early, case), case)
    node = _find_vanished_node(case)
    if node is not None:
        return node_failure(case, 0.65, sample(timeouts + lost))
    if timeouts:
        return _judge_timeout(timeouts, case)
    return _judge_lost_connection(lost, case)


def _find_ended_before_timeout(
    weak: list[RankEnd], timeouts: list[RankEnd], case: FailureContext
) -> list[RankEnd]:
    """Return the ranks that ended without a message before other ranks timed out."""
    first_timeout = min((end.rank.ended for end in timeouts if end.rank.ended is not None), default=None)
    recorded_first = case.findings.first
    return [
        end
        for end in weak
        if (recorded_first is not None and end.rank.rank == recorded_first[0])
        or first_timeout is None
        or (end.rank.ended is not None and end.rank.ended < first_timeout - case.slack)
    ]


def first_weak(ends: list[RankEnd], case: FailureContext) -> RankEnd:
    """Return the rank that ended first among those without a message.

    A rank that a signal ended takes precedence over one with an exit code. SIGKILL after the first recorded
    failure does not count as a signal: launchers send it to ranks that ignore SIGTERM.
    """
    recorded_first = case.findings.first
    first_end = next(
        (end.rank.ended for end in ends if recorded_first and end.rank.rank == recorded_first[0]), None
    )
    signalled = [
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
    return find_first_failure(signalled or ends, case)


def _find_vanished_node(case: FailureContext) -> str | None:
    """Return the node of which no rank recorded an end while the ranks of all other nodes did."""
    silent = case.of_kind("silent")
    hosts = {end.rank.host for end in silent}
    if len(hosts) != 1 or not case.facts.over:
        return None
    host = hosts.pop()
    node_ends = [end for end in case.ends if end.rank.host == host]
    if not host or len(node_ends) != len(silent) or len(node_ends) == len(case.ends):
        return None
    return host if len(node_ends) > 1 or case.of_kind("lost-peer") else None


def _judge_timeout(timeouts: list[RankEnd], case: FailureContext) -> Verdict:
    missing = missing_rank.find(case.ends, case.findings.dumps)
    timeout_reason = timeouts[0].reason
    assert timeout_reason is not None  # noqa: S101 - a timeout has its line
    if missing is None:
        unknown_summary = (
            f"{len(timeouts)} ranks waited in a collective that did not end, and no rank is known to be late"
        )
        return replace(verdict_of(None, timeout_reason, 0.5, case), summary=unknown_summary)
    end = next(end for end in case.ends if end.rank.rank == missing.rank)
    missing_rank_lines = tuple(
        EvidenceLine(rank=missing.rank, file=end.rank.log.file, line=None, text=text)
        for text in end.rank.log.tail[-2:]
    )
    generic_summary = "a collective did not complete in time"
    detail = f" ({timeout_reason.summary})" if timeout_reason.summary not in ("", generic_summary) else ""
    waiting_ranks = f"{len(timeouts)} rank{'s' if len(timeouts) > 1 else ''}"
    summary = f"{waiting_ranks} waited for rank {missing.rank} in a collective{detail}: {missing.why}"
    verdict = verdict_of(end.rank, timeout_reason, missing.confidence, case)
    advice = (
        f"check what rank {missing.rank} did at that time: its log, a slow read, a branch that other "
        "ranks did not take"
    )
    return replace(verdict, summary=summary, advice=advice, evidence=(*missing_rank_lines, *sample(timeouts)))


def _judge_lost_connection(lost: list[RankEnd], case: FailureContext) -> Verdict:
    """Return the verdict on ranks that lost a connection without any rank reporting why."""
    strongest = max((end.reason for end in lost if end.reason), key=lambda one: one.strength)
    silent, exited = case.of_kind("silent"), case.of_kind("fine")
    if strongest.cause == "link-down":
        return replace(
            verdict_of(find_first_failure(lost, case).rank, strongest, 0.65, case), evidence=sample(lost)
        )
    if len(silent) == 1 and case.facts.over:
        summary = "it ended without a record while other ranks lost their connection to it"
        verdict = Verdict(
            cause="killed", summary=summary, advice="check the memory and the kernel log of that node"
        )
        return with_rank(verdict, silent[0].rank, 0.5, sample(lost))
    if exited and len(exited) < len(case.ends) / 2:
        rank = min(exited, key=lambda end: end.rank.ended or 0).rank
        code = rank.exit_code
        summary = (
            f"rank {rank.rank} ended with exit code {code} while other ranks still exchanged data with it"
        )
        advice = "all ranks must take the same number of steps; see Join of torch.distributed"
        verdict = Verdict(cause="collective-timeout", summary=summary, blame="code", advice=advice)
        return with_rank(verdict, rank, 0.7, sample(lost))
    ended = case.of_kind("ended")
    rank = (find_first_failure(ended, case) if len(ended) == 1 else find_first_failure(lost, case)).rank
    return replace(
        verdict_of(rank, strongest, 0.35, case),
        summary="ranks lost the connection to each other, and no rank reports a cause",
    )
