"""All that is known of one attempt, and what is asked of it again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.findings import Findings, LogEvidence, Rank
from dtslurm.diagnose.follow_on_errors import blamed
from dtslurm.diagnose.reasons import RankEnd, Reason, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Verdict
from dtslurm.model.values import dataclass

SKEW_S = 10.0  # two nodes' clocks, each five seconds off
_ONE_CLOCK_S = 2.0
CERTAIN = 80


@dataclass(frozen=True)
class FailureContext:
    """All that is known, and how each rank ended."""

    facts: JobFacts
    findings: Findings
    ends: tuple[RankEnd, ...]
    others: tuple[tuple[LogEvidence, Reason], ...]

    def of_kind(self, *kinds: str) -> list[RankEnd]:
        """Return the ranks that ended in one of these ways."""
        return [end for end in self.ends if end.kind in kinds]

    @property
    def slack(self) -> float:
        """Seconds by which the times of two ranks' ends must differ to tell which was first."""
        return _ONE_CLOCK_S if self.findings.exact else SKEW_S

    @property
    def stop(self) -> float | None:
        """When somebody or something outside told the job to end."""
        told = [
            event["time"] for event in self.findings.events if event.get("event") in ("signalled", "cancel")
        ]
        times = [float(time) for time in (self.facts.end, *told) if isinstance(time, (int, float))]
        begin = self.facts.start or 0
        return min((time for time in times if time >= begin), default=None)


def strength(ends: Sequence[RankEnd]) -> int:
    """Return how sure the surest reason of some ranks is."""
    return max((end.reason.strength for end in ends if end.reason), default=0)


# ---- Launchers and the batch script ----


def first(ends: Sequence[RankEnd], case: FailureContext) -> RankEnd:
    """Return the rank that failed first of those with reasons of their own."""
    best = strength(ends)
    pool = [end for end in ends if end.reason and end.reason.strength >= best - 20] or list(ends)
    first = case.findings.first
    for end in pool:
        if first is not None and end.rank.rank == first[0]:
            return end
    times = {end.rank.rank: time_of(end) for end in pool}
    known = [time for time in times.values() if time is not None]
    if known:
        near = min(known) + case.slack
        early = [end for end in pool if (time := times[end.rank.rank]) is not None and time <= near]
        # Who never recorded an end may have been ended later by force: what it says counts all the same.
        pool = early + [end for end in pool if times[end.rank.rank] is None]
    return min(pool, key=lambda end: (-(end.reason.strength if end.reason else 0), times[end.rank.rank] or 0))


def time_of(end: RankEnd) -> float | None:
    """Return when a rank ended, or last said something."""
    if end.rank.ended is not None:
        return end.rank.ended
    if end.reason is not None and end.reason.time is not None:
        return end.reason.time
    return end.rank.log.mtime


def before(end: RankEnd, case: FailureContext) -> bool:
    """Tell whether a rank failed by itself before the job was told to end."""
    stop, time = case.stop, time_of(end)
    if stop is None or end.reason is None:
        return True
    if end.reason.time is not None and end.reason.time < stop - SKEW_S:
        return True
    written = end.rank.log.mtime
    if any(seen is not None and seen < stop - SKEW_S for seen in (time, written)):
        return True
    alone = sum(1 for one in case.of_kind("cause") if one.reason and one.reason.same == end.reason.same)
    return end.reason.strength >= CERTAIN and alone <= max(1, len(case.ends) // 4)


def of_rank(end: RankEnd, case: FailureContext) -> Verdict:
    """Return the verdict that a rank failed first, by a reason of its own."""
    reason = end.reason
    assert reason is not None  # noqa: S101 - only ranks with reasons are chosen
    confidence = 0.95 if reason.strength >= CERTAIN else 0.9 if reason.strength >= 70 else 0.75
    if reason.strength < 45:
        confidence = 0.6 if signal_of(end.rank) == 9 else 0.85 if reason.cause == "killed" else 0.7
    first = case.findings.first
    if first is not None and first[0] != end.rank.rank:
        confidence -= 0.1
    return verdict_of(end.rank, reason, confidence, case)


def verdict_of(rank: Rank | None, reason: Reason, confidence: float, case: FailureContext) -> Verdict:
    """Return the verdict that a reason makes, on one rank or on the job."""
    verdict = Verdict(
        cause=reason.cause,
        summary=reason.summary,
        blame=reason.blame,
        confidence=round(confidence, 2),
        evidence=reason.lines,
        advice=reason.advice,
        time=case.facts.end,
    )
    if rank is None:
        return verdict
    verdict = placed(verdict, rank, verdict.confidence, reason.lines)
    blame, remark = blamed(reason, rank, case.ends)
    return replace(verdict, blame=blame, summary=verdict.summary + remark)


def _seconds(time: float | None) -> int | None:
    return int(time) if time is not None else None


def placed(verdict: Verdict, rank: Rank, confidence: float, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict with the rank it is about."""
    return replace(
        verdict, rank=rank.rank, local_rank=rank.local_rank, node=rank.host or None, confidence=confidence,
        exit_code=rank.exit_code, signal=signal_of(rank), time=_seconds(rank.ended or rank.log.mtime),
        evidence=lines,
    )  # fmt: skip


def sample(ends: Sequence[RankEnd]) -> tuple[EvidenceLine, ...]:
    """Return a line of each of the first ranks."""
    return tuple(line for end in ends[:2] if end.reason for line in end.reason.lines[-1:])
