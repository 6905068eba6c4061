"""What the words of a measured row mean: its precision, pipeline schedule, sharding and recomputation."""

from __future__ import annotations

import re

from dtslurm.planner.frameworks import SHARDING
from dtslurm.planner.layout import Recompute
from dtslurm.planner.measured.guesses import Row


def precision_of(row: Row, has_fp8: bool) -> str:
    """Return the number format that a row was run in; FP8 counts only on GPUs that have it."""
    text = (row.get("precision") or "").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text and has_fp8:
        return "fp8"
    if text in {"fp32", "tf32"}:
        return "fp32"
    return "fp16" if "fp16" in text else "bf16"


def schedule_of(notes: str) -> str:
    """Return the pipeline schedule that notes name."""
    names = r"\b(zbv|zb-?1p|zb-?h[12]|zero[- ]bubble|gpipe)\b"
    named = re.search(rf"schedule ?= ?([a-z0-9-]+)|{names}", notes)
    word = (named[1] or named[2]) if named else ""
    if word.startswith("zbv"):
        return "zbv"
    return "zb1p" if word.startswith(("zb", "zero")) else "gpipe" if word == "gpipe" else "1f1b"


def sharding_of(text: str, framework: str, ranks: int, assumed: list[str]) -> tuple[int, int]:
    """Return the ZeRO stage and the ranks of a shard group, 0 for all of them."""
    shard = 0
    if found := re.search(r"(?:shard(?: group)?|within node) \(?(\d+)", text) or re.search(
        r"\(shard (\d+)\)", text
    ):
        shard = min(int(found[1]), ranks)
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
    """Tell whether a row says what was recomputed; what its notes call taken ``from`` a setting is a guess.

    vTrain's runs on one node are such: with every layer run again the measured ones of hidden size 2048
    would be faster than the best matrix product anybody measured on that GPU.
    """
    text = (row.get("recompute") or "").strip()
    return bool(text) and not re.search(r"\brecompute (taken|read|inferred)? ?from\b", row.get("notes") or "")


def recompute_of(row: Row) -> Recompute:
    """Return what a row's runs computed again on the way back."""
    text = (row.get("recompute") or "").lower() if says_recompute(row) else ""
    if text.startswith("full"):
        return "full"
    if text.startswith("selective") and text != "selective mlp":
        return "selective"
    return "none"
