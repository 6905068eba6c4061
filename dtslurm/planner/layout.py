"""A way to split a model over GPUs, and whether it can be at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "zb1p", "zbv")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and what goes with them.

    Attributes:
        tp, pp, cp, ep, dp: tensor, pipeline, context, expert and data parallel degrees; tp·pp·cp·dp GPUs.
            Experts are spread inside the tp·cp·dp GPUs of a stage.
        etp: GPUs that split one expert between them where ep is more than 1; with ep=1 tp of them do.
        vp: virtual stages per GPU (interleaved 1F1B).
        mbs, gbs: sequences per micro-batch and data parallel rank, and per step of the whole job.
        zero: what the data parallel ranks share: 0 nothing (DDP), 1 optimizer, 2 gradients too, 3 weights too
            (FSDP).
        shard: ranks that share one copy, at most dp·cp; fewer is HSDP, or ZeRO inside the node.
        sp: activations between tensor parallel regions are split along the sequence.
        offload: optimizer states live in host memory.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    etp: int = 1
    vp: int = 1
    mbs: int = 1
    gbs: int = 1
    zero: int = 0
    shard: int = 0
    recompute: Recompute = "none"
    sp: bool = True
    schedule: str = "1f1b"
    offload: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on each data parallel rank."""
        return max(1, self.gbs // (self.mbs * self.dp))

    @property
    def expert_tp(self) -> int:
        """GPUs that split one expert between them."""
        return self.etp if self.ep > 1 else self.tp

    @property
    def expert_ranks(self) -> int:
        """GPUs that hold all experts once."""
        return self.ep * self.expert_tp

    @property
    def shards(self) -> int:
        """Ranks that share one copy of what ``zero`` shares."""
        return min(self.shard, self.dp * self.cp) if self.shard else self.dp * self.cp

    @property
    def gathers(self) -> bool:
        """Whether sharded weights are gathered anew for every micro-batch.

        With a pipeline they stay once gathered, until the step ends: torchtitan's default, and Llama 3's way
        (arXiv:2407.21783, 3.3.2).
        """
        return self.zero == 3 and self.pp == 1

    def __str__(self) -> str:
        """Return the form ``--layout`` takes, without what is at its default."""
        parts = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}"]
        parts += [
            f"{key}={getattr(self, key)}" for key in ("cp", "ep", "etp", "vp") if getattr(self, key) > 1
        ]
        parts += [f"mbs={self.mbs}", f"gbs={self.gbs}", f"zero={self.zero}"]
        if self.shard and self.shard < self.dp * self.cp:
            parts.append(f"shard={self.shard}")
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        if self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if not self.sp and self.tp > 1:
            parts.append("sp=0")
        if self.offload:
            parts.append("offload=1")
        return ",".join(parts)


_NUMBERS = ("tp", "pp", "cp", "ep", "etp", "dp", "vp", "mbs", "gbs", "shard")
_CHOICES: dict[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"),
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "sp": ("0", "1"),
    "offload": ("0", "1"),
}
_LARGEST = 10_000_000


class LayoutProblem(ValueError):
    """A layout that cannot be; ``problems`` names everything wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_layout(text: str) -> Layout:
    """Read ``tp=8,pp=16,dp=64,mbs=1,gbs=2048,recompute=selective,zero=1``.

    Raises:
        LayoutProblem: with everything that is wrong.
    """
    problems: list[str] = []
    values: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        value = value.strip()
        if key in values:
            problems.append(f"{key} is given twice")
        elif not equals:
            problems.append(f"{part!r} should read key=value, as in tp=8")
        elif key in _NUMBERS:
            values[key] = _whole(key, value, problems)
        elif key in _CHOICES:
            chosen = _choice(key, value, _CHOICES[key], problems)
            values[key] = chosen == 1 if key in {"sp", "offload"} else chosen
        else:
            known = ", ".join((*_NUMBERS, *_CHOICES))
            problems.append(f"{key!r} is not part of a layout; known are {known}")
    if not values and not problems:
        problems.append("the layout is empty; write for example tp=8,pp=2,dp=4,mbs=1,gbs=256,zero=1")
    if problems:
        raise LayoutProblem(problems)
    if "gbs" not in values:
        values["gbs"] = int(str(values.get("mbs", 1))) * int(str(values.get("dp", 1)))
    return Layout(**values)  # type: ignore[arg-type]


def _whole(key: str, value: str, problems: list[str]) -> int:
    if re.fullmatch(r"\d{1,8}", value) and 1 <= int(value) <= _LARGEST:
        return int(value)
    problems.append(f"{key} should be a whole number from 1 to {_LARGEST:,}, not {value!r}")
    return 1


def _choice(key: str, value: str, known: tuple[str, ...], problems: list[str]) -> object:
    if value not in known:
        problems.append(f"{key} should be one of {', '.join(known)}, not {value!r}")
        return known[0]
    return int(value) if value.isdigit() else value
