"""The current activity of a running job's ranks, and the verdict on it."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class StackFrame:
    """A frame of a stack; ``line`` is 0 if unknown."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """The state of one rank of a running job at one time.

    Attributes:
        state: the state of the main thread, a letter as in /proc (``R`` running, ``S`` sleeping, ``D``
            waiting for a device or file system, ``T`` stopped, empty if not sampled or gone).
        cpu: the number of cores that the rank kept busy during the sample.
        moved: whether the main thread was in another place a second later, None if unknown.
        waits: what the main thread waits for according to the kernel.
        frames: the stack of the main thread, innermost frame first; empty if no stack is available.
        by: the source of the frames: ``py-spy``, ``signal``, ``proc`` (no frames), ``none`` (no such process)
            or empty (the node was not sampled).
        workers: the activity of the data loader processes, in words.
        silent_s: seconds since the last output in the rank's log, None if there was none.
        started, ended: whether there is a record of the start and of the end.
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
    """Ranks that are in the same place.

    Attributes:
        kind: ``waits`` (for other ranks), ``data`` (for its data loader), ``locked`` (waits for another build
            of a C++ extension), ``builds`` (a C++ extension), ``stopped``, ``blocked`` (by a device or file
            system), ``gone``, ``ended``, ``absent`` (never started), ``computes``, ``busy`` (in one place:
            computing, or waiting for its GPU), ``sleeps``, or ``unseen``.
        what: the place in words.
        ranks: folded, as ``0-6,8``; ``count`` is their number.
        frames: the stack of one of the ranks, innermost frame first.
        example: the rank whose stack ``frames`` is.
    """

    kind: str
    what: str
    ranks: str
    count: int
    example: int
    frames: tuple[StackFrame, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LiveVerdict:
    """Whether a running job makes progress, and which rank delays the others.

    Attributes:
        cause: ``hang`` (nothing moves), ``slow`` (others wait for a rank that is active), ``none`` (the job
            makes progress) or ``unknown``.
        confidence: 0 to 1; below 0.7 the cause is a guess.
        rank, local_rank, node: of the rank that the others wait for, None if it is not a single rank.
        suspects: all ranks that the others wait for, folded.
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
