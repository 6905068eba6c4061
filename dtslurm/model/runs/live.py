"""What the ranks of a running job are doing, and what is said of it."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class StackFrame:
    """One place of a stack; ``line`` is 0 where it is not known."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """One rank of a running job at one moment.

    Attributes:
        state: of its main thread, a letter as in /proc (``R`` runs, ``S`` sleeps, ``D`` waits for a device or
            file system, ``T`` is stopped, empty: not looked at or gone).
        cpu: cores it kept busy while it was looked at.
        moved: whether its main thread was at another place a second later; None where that is not known.
        waits: what the kernel says its main thread waits for.
        frames: of its main thread, innermost first; empty where no stack could be had.
        by: where the frames are from: ``py-spy``, ``signal``, ``proc`` (none), ``none`` (no such process) or
            empty (its node was not looked at).
        workers: what its data loading processes do, in words.
        silent_s: seconds since its last word in its log, None if it never spoke.
        started, ended: whether there is a record of that.
    """

    rank: int
    local_rank: int | None = None
    host: str = ""
    pid: int | None = None
    state: str = ""
    cpu: float = 0.0
    moved: bool | None = None
    waits: str = ""
    frames: tuple[StackFrame, ...] = ()
    by: str = ""
    workers: tuple[str, ...] = ()
    silent_s: float | None = None
    started: bool = True
    ended: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks that are at the same place.

    Attributes:
        kind: ``waits`` (for other ranks), ``data`` (for its data loader), ``stopped``, ``blocked`` (by a
            device or file system), ``gone``, ``ended``, ``absent`` (never started), ``computes``, ``busy``
            (at one place: computing, or waiting for its GPU), ``sleeps``, or ``unseen``.
        what: the place in words.
        ranks: folded, as ``0-6,8``; ``count`` of them.
        frames: the stack of one of them, innermost first.
        example: the rank that ``frames`` are of.
    """

    kind: str
    what: str
    ranks: str
    count: int
    example: int
    frames: tuple[StackFrame, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LiveVerdict:
    """Whether a running job makes progress, and which rank keeps the others.

    Attributes:
        cause: ``hang`` (nothing moves), ``slow`` (others wait for one that does something), ``none`` (it
            makes progress) or ``unknown``.
        confidence: 0 to 1; below 0.7 it is a guess.
        rank, local_rank, node: of the rank that the others wait for; None where it is not one rank.
        suspects: all such ranks, folded.
    """

    cause: str
    summary: str
    confidence: float
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    suspects: str = ""
    advice: str = ""
    places: tuple[StackGroup, ...] = ()
