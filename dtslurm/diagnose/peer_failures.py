"""Ranks that only tell of others: behind a timeout or a lost connection is one that says nothing."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose import missing_rank
from dtslurm.diagnose.external_causes import node_failure
from dtslurm.diagnose.failure_context import FailureContext, first, of_rank, placed, sample, verdict_of
from dtslurm.diagnose.reasons import RankEnd, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict


def from_others(case: FailureContext) -> Verdict | None:
    """Return the verdict on ranks that wait for or lost others, None where no rank says so."""
    timeouts, lost, weak = case.of_kind("timeout"), case.of_kind("lost-peer"), case.of_kind("weak")
    if not timeouts and not lost:
        return None
    dead = _dead_before(weak, timeouts, case) if timeouts else weak
    if dead:
        return of_rank(first_weak(dead, case), case)
    node = _vanished(case)
    if node is not None:
        return node_failure(case, 0.65, sample(timeouts + lost))
    if timeouts:
        return _hung(timeouts, case)
    return _lost(lost, case)


def _dead_before(weak: list[RankEnd], timeouts: list[RankEnd], case: FailureContext) -> list[RankEnd]:
    """Return the ranks that ended without a word before others gave up waiting."""
    given_up = min((end.rank.ended for end in timeouts if end.rank.ended is not None), default=None)
    first = case.findings.first
    return [
        end
        for end in weak
        if (first is not None and end.rank.rank == first[0])
        or given_up is None
        or (end.rank.ended is not None and end.rank.ended < given_up - case.slack)
    ]


def first_weak(ends: list[RankEnd], case: FailureContext) -> RankEnd:
    """Return who ended first of those that say nothing; a signal says more than an exit code.

    But not SIGKILL after the first recorded failure: by that launchers end whoever does not heed TERM.
    """
    known = case.findings.first
    at = next((end.rank.ended for end in ends if known and end.rank.rank == known[0]), None)
    signalled = [
        end
        for end in ends
        if (number := signal_of(end.rank)) is not None
        and not (number == 9 and at is not None and end.rank.ended is not None and end.rank.ended > at)
    ]
    return first(signalled or ends, case)


def _vanished(case: FailureContext) -> str | None:
    """Return the node none of whose ranks recorded an end while all others did."""
    silent = case.of_kind("silent")
    hosts = {end.rank.host for end in silent}
    if len(hosts) != 1 or not case.facts.over:
        return None
    host = hosts.pop()
    here = [end for end in case.ends if end.rank.host == host]
    if not host or len(here) != len(silent) or len(here) == len(case.ends):
        return None
    return host if len(here) > 1 or case.of_kind("lost-peer") else None


def _hung(timeouts: list[RankEnd], case: FailureContext) -> Verdict:
    found = missing_rank.find(case.ends, case.findings.dumps)
    said = timeouts[0].reason
    assert said is not None  # noqa: S101 - a timeout has its line
    if found is None:
        waited = (
            f"{len(timeouts)} ranks waited in a collective that did not end, and no rank is known to be late"
        )
        return replace(verdict_of(None, said, 0.5, case), summary=waited)
    end = next(end for end in case.ends if end.rank.rank == found.rank)
    own = tuple(
        EvidenceLine(rank=found.rank, file=end.rank.log.file, line=None, text=text)
        for text in end.rank.log.tail[-2:]
    )
    plain = "a collective did not end in time"
    what = f" ({said.summary})" if said.summary not in ("", plain) else ""
    others = f"{len(timeouts)} rank{'s' if len(timeouts) > 1 else ''}"
    summary = f"{others} waited for rank {found.rank} in a collective{what}: {found.why}"
    verdict = verdict_of(end.rank, said, found.confidence, case)
    advice = (
        f"look at what rank {found.rank} did then: its log, a slow read, a branch that others did not take"
    )
    return replace(verdict, summary=summary, advice=advice, evidence=(*own, *sample(timeouts)))


def _lost(lost: list[RankEnd], case: FailureContext) -> Verdict:
    """Judge ranks that lost a connection where nobody says why."""
    strongest = max((end.reason for end in lost if end.reason), key=lambda one: one.strength)
    silent, fine = case.of_kind("silent"), case.of_kind("fine")
    if strongest.cause == "link-down":
        return replace(verdict_of(first(lost, case).rank, strongest, 0.65, case), evidence=sample(lost))
    if len(silent) == 1 and case.facts.over:
        summary = "it was ended without a trace while others lost their connection to it"
        verdict = Verdict(
            cause="killed", summary=summary, advice="look at that node's memory and at its kernel's log"
        )
        return placed(verdict, silent[0].rank, 0.5, sample(lost))
    if fine and len(fine) < len(case.ends) / 2:
        rank = min(fine, key=lambda end: end.rank.ended or 0).rank
        code = rank.exit_code
        summary = f"rank {rank.rank} ended with exit code {code} while others still exchanged data with it"
        advice = "all ranks must take the same number of steps; see Join of torch.distributed"
        verdict = Verdict(cause="collective-timeout", summary=summary, blame="code", advice=advice)
        return placed(verdict, rank, 0.7, sample(lost))
    ended = case.of_kind("ended")
    rank = (first(ended, case) if len(ended) == 1 else first(lost, case)).rank
    return replace(
        verdict_of(rank, strongest, 0.35, case),
        summary="ranks lost the connection to each other, and no rank says why",
    )
