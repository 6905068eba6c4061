"""The profiles of ranks as a table, and the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.runs.profile import KINDS, RankMemory, RankProfile
from dtslurm.presentation.quantities import format_bytes
from dtslurm.views.profile import find_straggler

_TITLES = {
    "compute": "COMPUTE",
    "communication": "COMM",
    "data": "DATA",
    "checkpoint": "CKPT",
    "other": "OTHER",
}


MEMORY_COLUMNS = ("RANK", "DEVICE", "PEAK", "RESERVED", "GROWTH", "MOST ALLOCATED BY")


def memory_row(memory: RankMemory) -> tuple[str, ...]:
    """Return the row of the memory of a rank."""
    reserved = format_bytes(memory.reserved) if memory.reserved else "-"
    growth = f"{'-' if memory.growth < 0 else '+'}{format_bytes(abs(memory.growth))}"
    spot = "".join(f"{spot.operator} {format_bytes(spot.size)}" for spot in memory.spots[:1])
    return (
        memory.label,
        memory.device,
        format_bytes(memory.peak),
        reserved,
        growth,
        spot or "-",
    )


def profile_columns(profiles: Sequence[RankProfile]) -> tuple[str, ...]:
    """Return the titles of the columns of `profile_row`."""
    kinds = profiles[0].shares if profiles else KINDS
    return ("RANK", *(_TITLES[kind] for kind in kinds), "MOST TIME IN")


def profile_row(profile: RankProfile) -> tuple[str, ...]:
    """Return the row of a rank: its shares, and its largest hot spot."""
    shares = [f"{share:.0%}" for share in profile.shares.values()]
    spot = "".join(f"{spot.place} {spot.share:.0%}" for spot in profile.hot_spots[:1])
    return (profile.label, *shares, spot or "-")


def explain_straggler(profiles: Sequence[RankProfile]) -> str:
    """Return which rank the others wait for, or why that is unknown; empty if the ranks hardly differ."""
    if not all(profile.is_comparable for profile in profiles):
        return (
            "which rank the others wait for is unknown: the ranks did not record the same steps, because the "
            "request did not reach them at the same time; repeat the command, or record more steps (--steps)"
        )
    found = find_straggler(profiles)
    if found is None:
        return ""
    least, most = found
    text = (
        f"rank {least.label} communicates {least.shares['communication']:.0%} of the time, "
        f"rank {most.label} {most.shares['communication']:.0%}: the others wait for rank {least.label}"
    )
    return text + (f", which is mostly in {least.hot_spots[0].place}" if least.hot_spots else "")
