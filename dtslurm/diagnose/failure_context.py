"""All evidence on one attempt, and the helpers that several diagnosis modules share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.findings import Findings, LogEvidence, Rank
from dtslurm.diagnose.follow_on_errors import assign_blame
from dtslurm.diagnose.reasons import RankEnd, Reason, signal_of
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Verdict
from dtslurm.model.values import dataclass
from dtslurm.worker.lib.json_records import finite_number

SKEW_S = 10.0  # the clocks of two nodes, each up to five seconds off
_ONE_CLOCK_S = 2.0
CERTAIN = 80


@dataclass(frozen=True)
class FailureContext:
    """All evidence on one attempt, and how each rank ended."""

    facts: JobFacts
    findings: Findings
    ends: tuple[RankEnd, ...]
    job_reasons: tuple[tuple[LogEvidence, Reason], ...]

    def of_kind(self, *kinds: str) -> list[RankEnd]:
        """Return the ends of the ranks that ended in one of these ways."""
        return [end for end in self.ends if end.kind in kinds]

    @property
    def slack(self) -> float:
        """The seconds by which two ranks' end times must differ to show which rank ended first."""
        return _ONE_CLOCK_S if self.findings.exact else SKEW_S

    @property
    def stop(self) -> float | None:
        """When a user or Slurm signaled the job to end, in seconds since the epoch; None if neither did."""
        request_times = [
            event.get("time")
            for event in self.findings.events
            if event.get("event") in ("signalled", "cancel")
        ]
        times = map(finite_number, (self.facts.end, self.facts.preempted_at, *request_times))
        start = self.facts.start or 0
        return min((time for time in times if time is not None and time >= start), default=None)


def strength(ends: Sequence[RankEnd]) -> int:
    """Return the highest strength among the ranks' reasons, 0 without a reason."""
    return max((end.reason.strength for end in ends if end.reason), default=0)


# ---- Launchers and the batch script ----


def find_first_failure(ends: Sequence[RankEnd], context: FailureContext) -> RankEnd:
    """Return the rank that failed first among those with a reason of their own."""
    max_strength = strength(ends)
    candidates = [end for end in ends if end.reason and end.reason.strength >= max_strength - 20] or list(
        ends
    )
    recorded_first = context.findings.first
    for end in candidates:
        if recorded_first is not None and end.rank.rank == recorded_first[0]:
            return end
    times = {end.rank.rank: time_of(end) for end in candidates}
    known_times = [time for time in times.values() if time is not None]
    if known_times:
        latest_time = min(known_times) + context.slack
        early_ends = [
            end for end in candidates if (time := times[end.rank.rank]) is not None and time <= latest_time
        ]
        # A rank without a recorded end may have been killed later: its reason counts nevertheless.
        candidates = early_ends + [end for end in candidates if times[end.rank.rank] is None]
    return min(
        candidates, key=lambda end: (-(end.reason.strength if end.reason else 0), times[end.rank.rank] or 0)
    )


def time_of(end: RankEnd) -> float | None:
    """Return the time at which a rank ended or last wrote to its log, or None."""
    if end.rank.ended is not None:
        return end.rank.ended
    if end.reason is not None and end.reason.time is not None:
        return end.reason.time
    return end.rank.log.mtime


def failed_before_stop(end: RankEnd, context: FailureContext) -> bool:
    """Return whether a rank failed before a user or Slurm signaled the job to end."""
    stop, time = context.stop, time_of(end)
    if stop is None or end.reason is None:
        return True
    if end.reason.time is not None and end.reason.time < stop - SKEW_S:
        return True
    last_output = end.rank.log.mtime
    if any(known_time is not None and known_time < stop - SKEW_S for known_time in (time, last_output)):
        return True
    same_reason_count = sum(
        1 for other in context.of_kind("cause") if other.reason and other.reason.same == end.reason.same
    )
    return end.reason.strength >= CERTAIN and same_reason_count <= max(1, len(context.ends) // 4)


def judge_rank(end: RankEnd, context: FailureContext) -> Verdict:
    """Return the verdict that a rank failed first, for a reason of its own."""
    reason = end.reason
    assert reason is not None  # noqa: S101 - only ranks with reasons are chosen
    confidence = 0.95 if reason.strength >= CERTAIN else 0.9 if reason.strength >= 70 else 0.75
    if reason.strength < 45:
        confidence = 0.6 if signal_of(end.rank) == 9 else 0.85 if reason.cause == "killed" else 0.7
    recorded_first = context.findings.first
    if recorded_first is not None and recorded_first[0] != end.rank.rank:
        confidence -= 0.1
    return verdict_of(end.rank, reason, confidence, context)


def verdict_of(rank: Rank | None, reason: Reason, confidence: float, context: FailureContext) -> Verdict:
    """Return the verdict for a reason, on one rank or on the job."""
    verdict = Verdict(
        cause=reason.cause,
        summary=reason.summary,
        blame=reason.blame,
        confidence=round(confidence, 2),
        evidence=reason.lines,
        advice=reason.advice,
        time=context.facts.end,
    )
    if rank is None:
        return verdict
    verdict = with_rank(verdict, rank, verdict.confidence, reason.lines)
    blame, remark = assign_blame(reason, rank, context.ends)
    return replace(verdict, blame=blame, summary=verdict.summary + remark)


def _whole_seconds(time: float | None) -> int | None:
    return int(time) if time is not None else None


def with_rank(verdict: Verdict, rank: Rank, confidence: float, lines: tuple[EvidenceLine, ...]) -> Verdict:
    """Return the verdict with the rank that it is about."""
    return replace(
        verdict, rank=rank.rank, local_rank=rank.local_rank, node=rank.host or None, confidence=confidence,
        exit_code=rank.exit_code, signal=signal_of(rank), time=_whole_seconds(rank.ended or rank.log.mtime),
        evidence=lines,
    )  # fmt: skip


def sample(ends: Sequence[RankEnd]) -> tuple[EvidenceLine, ...]:
    """Return one line of evidence of each of the first two ranks."""
    return tuple(line for end in ends[:2] if end.reason for line in end.reason.lines[-1:])
