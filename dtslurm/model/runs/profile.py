"""Where a rank of a running job spends its time."""

from __future__ import annotations

from collections.abc import Mapping

from dtslurm.model.values import dataclass

KINDS = ("compute", "communication", "data", "checkpoint")


@dataclass(frozen=True)
class HotSpot:
    """A line of the user's own code, and the share of the time that the rank spent in it and below it."""

    place: str
    share: float


@dataclass(frozen=True)
class RankProfile:
    """The profile of one rank.

    Attributes:
        label: the number of the rank, or ROLE/NUMBER for an instance of a role.
        seconds: how long its main thread was observed.
        shares: the share of each of `KINDS` in this time; they add up to 1. "compute" is all that is known to
            be nothing else.
        hot_spots: the lines with the largest shares, the largest first.
    """

    label: str
    seconds: float
    shares: Mapping[str, float]
    hot_spots: tuple[HotSpot, ...]
