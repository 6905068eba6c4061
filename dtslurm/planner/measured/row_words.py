"""Parsers for the text columns of a measured row: precision, pipeline schedule, sharding, recomputation."""

from __future__ import annotations

import re

from dtslurm.planner.frameworks import SHARDING
from dtslurm.planner.layout import Recompute
from dtslurm.planner.measured.guesses import Row


def precision_of(row: Row, has_fp8: bool) -> str:
    """Return the number format of a row's run; FP8 is returned only for GPUs that support it."""
    text = (row.get("precision") or "").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text and has_fp8:
        return "fp8"
    if text in {"fp32", "tf32"}:
        return "fp32"
    return "fp16" if "fp16" in text else "bf16"


def schedule_of(notes: str) -> str:
    """Return the pipeline schedule that the notes name, ``1f1b`` if they name none."""
    schedule_names = r"\b(zbv|zb-?1p|zb-?h[12]|zero[- ]bubble|gpipe)\b"
    match = re.search(rf"schedule ?= ?([a-z0-9-]+)|{schedule_names}", notes)
    word = (match[1] or match[2]) if match else ""
    if word.startswith("zbv"):
        return "zbv"
    return "zb1p" if word.startswith(("zb", "zero")) else "gpipe" if word == "gpipe" else "1f1b"


def sharding_of(text: str, framework: str, ranks: int, assumed: list[str]) -> tuple[int, int]:
    """Return the ZeRO stage and the number of ranks in a shard group, 0 for all ranks."""
    shard = 0
    if match := re.search(r"(?:shard(?: group)?|within node) \(?(\d+)", text) or re.search(
        r"\(shard (\d+)\)", text
    ):
        shard = min(int(match[1]), ranks)
    if "none" in text or text in {"ddp", "dp"}:
        return 0, 0
    if "grad_op" in text or "zero-2" in text or "zero2" in text:
        return 2, shard
    if "fsdp" in text or "zero-3" in text or "zero3" in text or "shard group" in text or "hsdp" in text:
        return 3, shard
    if "zero-1" in text or "zero1" in text or "distributed optimizer" in text or "bf16_optimizer" in text:
        return 1, shard
    if not text:
        zero = 3 if framework in SHARDING else 1
        assumed.append(f"sharding not stated: ZeRO-{zero}")
        return zero, 0
    return (0, 0)


def says_recompute(row: Row) -> bool:
    """Return whether a row states the recomputation; a value that its notes call taken ``from`` is a guess.

    vTrain's runs on one node are an example: if every layer had been recomputed, the measured runs of hidden
    size 2048 would be faster than the best matrix product that was ever measured on that GPU.
    """
    text = (row.get("recompute") or "").strip()
    return bool(text) and not re.search(r"\brecompute (taken|read|inferred)? ?from\b", row.get("notes") or "")


def recompute_of(row: Row) -> Recompute:
    """Return what a row's run recomputed in the backward pass.

    ``selective mlp`` names modules of Megatron-LM. With flash attention, ``core_attn`` frees nothing.
    """
    text = (row.get("recompute") or "").lower().strip() if says_recompute(row) else ""
    if text.startswith("full"):
        return "full"
    if text.startswith("selective"):
        modules = set(text.removeprefix("selective").strip().split("+"))
        return "mlp" if "mlp" in modules and modules <= {"mlp", "core_attn"} else "selective"
    return "none"
