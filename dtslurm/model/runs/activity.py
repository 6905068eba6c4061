"""The latest activity of a running job's ranks, and whether the job is stalled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeActivity:
    """The latest activity of a node's ranks, seen by the node's sampler; times are seconds since the epoch.

    Attributes:
        time: when the sampler took the sample.
        ranks: the ranks that run on the node.
        seen: the ranks that ever ran on the node in this attempt.
        world_size: the number of ranks of the job, None if the ranks do not report it.
        output: when a rank's log or the training metrics last grew.
        cpu: when a rank itself last used a CPU.
        children: when a child process of a rank last used a CPU.
        io: when the ranks last read or wrote a large amount.
        gpu: when a GPU last computed.
        learned: whether training has begun.
        longest_s: the longest pause in the output since training began.
        waits: by rank, what the rank waits for: (``child``, the name of its program), ``stopped`` or
            ``blocked``.
        over: whether all ranks of the node have ended.
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
    """The activity of a running job according to the samples of all its nodes.

    Attributes:
        stalled: whether no rank has been active for far longer than usual.
        since: when a rank was last active, in seconds since the epoch.
        quiet_s: seconds since a rank was last active.
        summary: a description of the activity, empty if nothing is unusual.
    """

    stalled: bool
    since: float
    quiet_s: float
    summary: str = ""
