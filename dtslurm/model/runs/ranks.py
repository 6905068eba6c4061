"""The state of a rank for screens and reports."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class RankCell:
    """The state of one rank.

    Attributes:
        state: ``waiting`` (no record yet), ``running``, ``done``, ``failed``, ``terminated`` (ended by
            SIGTERM) or ``lost`` (the attempt has ended and the rank recorded no end).
        failed_first: whether the rank was the first to fail.
        gpu: use of the rank's GPU in percent; ``memory`` is the used share of that GPU's memory, 0 to 1.
        silent: seconds since the rank last wrote output, None if it never did or has ended.
        odd: a description of how the rank differs from the other ranks, empty if it does not.
    """

    rank: int
    state: str = "waiting"
    node_rank: int | None = None
    host: str = ""
    pid: int | None = None
    gpu: float | None = None
    memory: float | None = None
    silent: float | None = None
    size: int = 0
    exit_code: int | None = None
    signal: int | None = None
    failed_first: bool = False
    odd: str = ""
