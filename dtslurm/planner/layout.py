"""Layouts: the split of a model over GPUs, and the parser of ``--layout``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "mlp", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")
SCHEDULES = ("1f1b", "gpipe", "zb1p", "zbv")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, batch sizes and memory options of a training job.

    Attributes:
        tp, pp, cp, ep, dp: tensor, pipeline, context, expert and data parallel degrees. The job has
            tp·pp·cp·dp GPUs. Experts are distributed over the tp·cp·dp GPUs of a stage.
        etp: number of GPUs that split one expert if ep is more than 1; with ep=1 the number is tp.
        vp: virtual stages per GPU (interleaved 1F1B).
        mbs, gbs: sequences per micro-batch and data parallel rank, and per step of the whole job.
        zero: states sharded over the data parallel ranks: 0 none (DDP), 1 optimizer, 2 also gradients, 3 also
            weights (FSDP).
        shard: number of ranks that share one copy, at most dp·cp; fewer means HSDP, or ZeRO inside the node.
        recompute: what the backward pass computes again: nothing, operators that cost little time, the MLPs
            of dense layers (Megatron-LM's ``--recompute-modules mlp``), or whole layers.
        sp: whether activations between tensor parallel regions are split along the sequence.
        offload: whether optimizer states are in host memory.
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
        """Number of GPUs of the whole job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step on each data parallel rank."""
        return max(1, self.gbs // (self.mbs * self.dp))

    @property
    def expert_tp(self) -> int:
        """Number of GPUs that split one expert."""
        return self.etp if self.ep > 1 else self.tp

    @property
    def expert_ranks(self) -> int:
        """Number of GPUs that together hold each expert once."""
        return self.ep * self.expert_tp

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the sharded states."""
        return min(self.shard, self.dp * self.cp) if self.shard else self.dp * self.cp

    @property
    def gathers(self) -> bool:
        """Whether sharded weights are gathered again for each micro-batch.

        With a pipeline, gathered weights stay until the end of the step, as is the default in torchtitan and
        as Llama 3 was trained (arXiv:2407.21783, 3.3.2).
        """
        return self.zero == 3 and self.pp == 1

    def __str__(self) -> str:
        """Return the text for ``--layout``, without optional keys that have their default."""
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


_COUNT_KEYS = ("tp", "pp", "cp", "ep", "etp", "dp", "vp", "mbs", "gbs", "shard")
_CHOICES_BY_KEY: dict[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"),
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "sp": ("0", "1"),
    "offload": ("0", "1"),
}
_LARGEST = 10_000_000


class LayoutProblem(ValueError):
    """An invalid layout; ``problems`` lists all errors."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_layout(text: str) -> Layout:
    """Parse a layout such as ``tp=8,pp=16,dp=64,mbs=1,gbs=2048,recompute=selective,zero=1``.

    Raises:
        LayoutProblem: the text is invalid; the exception lists all errors.
    """
    problems: list[str] = []
    values: dict[str, object] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = pair.partition("=")
        key = key.strip().lower()
        value = value.strip()
        if key in values:
            problems.append(f"{key} is given twice")
        elif not equals:
            problems.append(f"{pair!r} should read key=value, as in tp=8")
        elif key in _COUNT_KEYS:
            values[key] = _parse_count(key, value, problems)
        elif key in _CHOICES_BY_KEY:
            choice = _parse_choice(key, value, _CHOICES_BY_KEY[key], problems)
            values[key] = choice == 1 if key in {"sp", "offload"} else choice
        else:
            known_keys = ", ".join((*_COUNT_KEYS, *_CHOICES_BY_KEY))
            problems.append(f"{key!r} is not part of a layout; known are {known_keys}")
    if not values and not problems:
        problems.append("the layout is empty; write for example tp=8,pp=2,dp=4,mbs=1,gbs=256,zero=1")
    if problems:
        raise LayoutProblem(problems)
    if "gbs" not in values:
        values["gbs"] = int(str(values.get("mbs", 1))) * int(str(values.get("dp", 1)))
    return Layout(**values)  # type: ignore[arg-type]


def _parse_count(key: str, value: str, problems: list[str]) -> int:
    if re.fullmatch(r"\d{1,8}", value) and 1 <= int(value) <= _LARGEST:
        return int(value)
    problems.append(f"{key} should be a whole number from 1 to {_LARGEST:,}, not {value!r}")
    return 1


def _parse_choice(key: str, value: str, choices: tuple[str, ...], problems: list[str]) -> object:
    if value not in choices:
        problems.append(f"{key} should be one of {', '.join(choices)}, not {value!r}")
        return choices[0]
    return int(value) if value.isdigit() else value
