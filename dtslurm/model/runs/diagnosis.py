"""Failure signatures, and the result of a diagnosis."""

from __future__ import annotations

from dtslurm.model.values import dataclass

# What a log line can mean for the process that wrote it.
ROLES = ("cause", "lost-peer", "timeout", "ended", "report")
BLAMES = ("code", "node", "site", "user", "unknown")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A kind of log line, and the cause that it indicates.

    Attributes:
        cause: the slug of the verdict's cause.
        match: regular expressions of which at least one must match in a line; groups may be named.
        words: literal texts; every matching line contains one of them.
        role: one of ``ROLES``: why a process ends, or what a process reports after others have failed.
        strength: 0 to 100, how reliably such a line alone gives the reason why its process ended.
        lasting: whether the line keeps its meaning if the log continues after it.
        blame: one of ``BLAMES``.
        summary, advice: sentences; ``{group}`` is replaced, ``[[…]]`` is omitted if one of its groups is
            missing.
        examples: lines that must match.
    """

    name: str
    cause: str
    match: tuple[str, ...]
    words: tuple[str, ...]
    role: str = "cause"
    strength: int = 70
    lasting: bool = False
    blame: str = "unknown"
    summary: str = ""
    advice: str = ""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvidenceLine:
    """A line that supports a verdict: ``line`` counts from 1; ``rank`` is None for the batch script's log."""

    rank: int | None
    file: str
    line: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """A consequence of the failure: how many ``ranks`` (folded, as ``0-6,8``) ended in which way."""

    what: str
    ranks: str = ""
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a diagnosis: the first rank that failed, its cause, and a fix.

    Attributes:
        rank, local_rank, node: None if the failure does not belong to one rank.
        time: seconds since the epoch, None if unknown.
        exit_code, signal: as in the rank's own record.
        cause: a slug such as ``gpu-out-of-memory``; ``none`` if nothing failed, ``stalled`` if the job runs
            but its ranks are inactive, ``unknown`` without evidence.
        confidence: 0 to 1; below 0.7 the cause is a guess.
        blame: who can fix the cause: ``code``, ``node``, ``site``, ``user`` or ``unknown``.
    """

    cause: str
    summary: str
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    time: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    confidence: float = 1.0
    blame: str = "unknown"
    evidence: tuple[EvidenceLine, ...] = ()
    advice: str = ""
    followed_by: tuple[Aftermath, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The facts about a job that do not come from its ranks.

    Attributes:
        state: Slurm's base state, or ``UNKNOWN``.
        over: whether the job has ended in that state.
        exit_code, signal: of the batch script.
        start, end: seconds since the epoch on the controller's clock.
        preempted_at: when Slurm began to end the job for a job of higher priority, as ``start``; None if
            Slurm did not or if that is unknown.
        time_limit: seconds.
        cancelled_by: the name of a user, or ``uid 1000``, if known.
        world_size: the expected number of ranks.
        gpus_per_node: the requested number of GPUs per node, None if the record does not contain it.
        attempt: the number of this attempt, from 0.
        attempts: the number of attempts.
        stall: for a running job that is stalled, a description of its activity.
        accounting: whether Slurm's accounting may be queried about the job.
    """

    job_id: str = ""
    state: str = "UNKNOWN"
    over: bool = False
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    start: int | None = None
    end: int | None = None
    preempted_at: int | None = None
    time_limit: int | None = None
    cancelled_by: str = ""
    nodelist: str = ""
    world_size: int = 1
    gpus_per_node: int | None = None
    attempt: int = 0
    attempts: int = 1
    stall: str = ""
    accounting: bool = True
