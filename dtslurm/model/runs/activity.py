"""What the ranks of a running job last did, and whether the job is stalled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeActivity:
    """The ranks of one node as the node's sampler saw them last; times are seconds since the epoch there.

    Attributes:
        time: when the sampler looked.
        ranks, seen: the ranks that run there, and those that ever ran there in this attempt.
        world_size: how many ranks the job has, None where they do not know it.
        output: when a rank's log or the training metrics last grew.
        cpu: when a rank last used a CPU itself; ``children``: when a process that it started did.
        io: when they last read or wrote much; ``gpu``: when a GPU last computed.
        learned: whether training has begun; ``longest_s``: its longest pause in output since.
        waits: by rank, what it waits for: (``child``, name of its program), ``stopped`` or ``blocked``.
        over: whether no rank runs there any more.
    """

    time: float
    ranks: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    world_size: int | None = None
    output: float = 0.0
    cpu: float = 0.0
    children: float = 0.0
    io: float = 0.0
    gpu: float = 0.0
    learned: bool = False
    longest_s: float = 0.0
    waits: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a running job does, by the samples of all its nodes.

    Attributes:
        stalled: whether no rank has done anything for far longer than usual.
        since: when a rank last did something, seconds since the epoch; ``quiet_s``: how long ago that was.
        summary: what was seen, in words; empty where nothing is unusual.
    """

    stalled: bool
    since: float
    quiet_s: float
    summary: str = ""
