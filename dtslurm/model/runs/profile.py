"""Where a rank of a running job spends its time."""

from __future__ import annotations

from collections.abc import Mapping

from dtslurm.model.values import dataclass

KINDS = ("compute", "communication", "data", "checkpoint")
STEP_KINDS = ("compute", "communication", "data", "other")


@dataclass(frozen=True)
class HotSpot:
    """What takes much time: a line of the user's own code with all below it, or an operation of torch alone.

    Attributes:
        share: the share of the time that the rank spent there.
    """

    place: str
    share: float


@dataclass(frozen=True)
class RankProfile:
    """The profile of one rank.

    Attributes:
        label: the number of the rank, or ROLE/NUMBER for an instance of a role.
        seconds: how long its main thread, or its steps, were observed.
        shares: the share of each of `KINDS` in this time, where "compute" is all that is known to be nothing
            else; or of each of `STEP_KINDS`, where "other" is the time without any operation of torch. They
            add up to 1.
        hot_spots: what has the largest shares, the largest first.
        is_comparable: False if the steps of all ranks have no time in common.
    """

    label: str
    seconds: float
    shares: Mapping[str, float]
    hot_spots: tuple[HotSpot, ...]
    is_comparable: bool = True


@dataclass(frozen=True)
class MemorySpot:
    """An operator of torch, and the bytes that it allocated in all steps, also if it released them again."""

    operator: str
    size: int


@dataclass(frozen=True)
class RankMemory:
    """The memory that the steps of one rank took on a device.

    Attributes:
        label: as in `RankProfile`.
        device: "CPU", or "GPU" with its number among those of the rank.
        peak: most bytes of tensors at one time; on the CPU, without those from before the profile.
        reserved: most bytes that torch had got from the device; 0 on the CPU.
        growth: bytes of tensors that were there after the steps and not before.
        spots: the operators that allocated most, the largest first.
    """

    label: str
    device: str
    peak: int
    reserved: int
    growth: int
    spots: tuple[MemorySpot, ...]
