"""What is known of failures, and what is said of one."""

from __future__ import annotations

from dtslurm.model.values import dataclass

# What a line in a log can tell of the process that wrote it.
ROLES = ("cause", "lost-peer", "timeout", "ended", "report")
BLAMES = ("code", "node", "site", "user", "unknown")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One kind of log line and what it tells.

    Attributes:
        cause: the verdict's slug.
        match: regular expressions of which one must be found in a line; groups may be named.
        words: literal texts of which every matching line has one.
        role: one of ``ROLES``: why a process ends, or what it says when others have failed.
        strength: 0 to 100, how surely such a line alone tells why its process ended.
        lasting: whether the log going on after the line leaves its meaning as it is.
        blame: one of ``BLAMES``.
        summary, advice: sentences; ``{group}`` is filled in, ``[[…]]`` left out where a group is missing.
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
    """A line that a verdict rests on: ``line`` counts from 1; ``rank`` is None for the batch script's log."""

    rank: int | None
    file: str
    line: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What came of the failure: how many ``ranks`` (folded, as ``0-6,8``) ended how."""

    what: str
    ranks: str = ""
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which rank failed first, why, and what to do.

    Attributes:
        rank, local_rank, node: None where the failure is not one rank's.
        time: seconds since the epoch, None where unknown.
        exit_code, signal: as the rank's own record has them.
        cause: a slug such as ``gpu-out-of-memory``; ``none`` if nothing failed, ``stalled`` if a job runs and
            its ranks do nothing, ``unknown`` if nothing tells.
        confidence: 0 to 1; below 0.7 it is a guess.
        blame: who can put it right: ``code``, ``node``, ``site``, ``user`` or ``unknown``.
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
    """What is known of a job besides its ranks.

    Attributes:
        state: Slurm's base state, or ``UNKNOWN``.
        over: whether that is the job's end.
        exit_code, signal: of the batch script.
        start, end: seconds since the epoch on the controller's clock.
        time_limit: seconds.
        cancelled_by: a person's name or ``uid 1000`` where it is known.
        world_size: how many ranks there should be.
        gpus_per_node: how many GPUs the job asked for on each node, None where the record does not say.
        attempt: which start of the job this is, from 0.
        attempts: how many starts there were.
        stall: of a job that runs and is stalled, what was seen, in words.
        accounting: whether Slurm's accounting may be asked about it.
    """

    job_id: str = ""
    state: str = "UNKNOWN"
    over: bool = False
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    start: int | None = None
    end: int | None = None
    time_limit: int | None = None
    cancelled_by: str = ""
    nodelist: str = ""
    world_size: int = 1
    gpus_per_node: int | None = None
    attempt: int = 0
    attempts: int = 1
    stall: str = ""
    accounting: bool = True
