"""The profiles of ranks as a table, and the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.runs.profile import KINDS, RankProfile
from dtslurm.views.profile import find_straggler

COLUMNS = ("RANK", "COMPUTE", "COMM", "DATA", "CKPT", "MOST TIME IN")


def profile_row(profile: RankProfile) -> tuple[str, ...]:
    """Return the row of a rank: the shares of `KINDS`, and its largest hot spot."""
    shares = [f"{profile.shares[kind]:.0%}" for kind in KINDS]
    spots = profile.hot_spots[:1]
    return (profile.label, *shares, *(f"{spot.place} {spot.share:.0%}" for spot in spots))


def explain_straggler(profiles: Sequence[RankProfile]) -> str:
    """Return which rank the others wait for, empty if the ranks hardly differ."""
    found = find_straggler(profiles)
    if found is None:
        return ""
    least, most = found
    text = (
        f"rank {least.label} communicates {least.shares['communication']:.0%} of the time, "
        f"rank {most.label} {most.shares['communication']:.0%}: the others wait for rank {least.label}"
    )
    return text + (f", which is mostly in {least.hot_spots[0].place}" if least.hot_spots else "")
