"""Behind a collective that did not end: the rank that the others waited for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dtslurm.diagnose.findings import Dump
from dtslurm.diagnose.reasons import RankEnd

_APART_S = 10.0  # clocks of two nodes may differ by this much


class MissingRank(NamedTuple):
    """The rank that did not come, how sure that is, and how it is known."""

    rank: int
    confidence: float
    why: str


def find(ends: Sequence[RankEnd], dumps: Sequence[Dump]) -> MissingRank | None:
    """Return the rank that the others waited for, None where nothing tells.

    In order: the ranks that a barrier names; flight records; the one rank that printed no timeout; of several
    the one whose log stopped first; the rank whose last enqueued work is lowest.
    """
    return _named(ends) or _by_dumps(dumps, len(ends)) or _silent(ends) or _behind(ends)


def _named(ends: Sequence[RankEnd]) -> MissingRank | None:
    named: Counter[int] = Counter()
    for end in ends:
        if end.kind == "timeout" and end.reason:
            named.update(int(word) for word in re.findall(r"\d+", end.reason.groups.get("missing", "")))
    known = {end.rank.rank for end in ends}
    missing = sorted(rank for rank in named if rank in known)
    if not missing:
        return None
    others = f"; so did {len(missing) - 1} more" if len(missing) > 1 else ""
    return MissingRank(missing[0], 0.9, f"the barrier names it: it did not come{others}")


def _by_dumps(dumps: Sequence[Dump], world: int) -> MissingRank | None:
    """Compare the groups that most ranks are in: who enqueued least, who enqueued something else."""
    last: dict[str, dict[int, int]] = defaultdict(dict)
    stuck: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for dump in dumps:
        for group, seen in dump.groups.items():
            last[group][dump.rank] = int(seen.get("enqueued", -1))
            if isinstance(seen.get("stuck"), dict):
                stuck[group, seen["stuck"]["seq"]][dump.rank] = str(seen["stuck"].get("op", ""))
    for _, numbers in sorted(last.items(), key=lambda item: -len(item[1])):
        least, most = min(numbers.values()), max(numbers.values())
        behind = [rank for rank, number in numbers.items() if number == least]
        if least < most and len(behind) <= len(numbers) / 2:
            return MissingRank(
                min(behind), 0.92, f"its flight record ends at collective {least}, those of others at {most}"
            )
    for operations in stuck.values():
        counts = Counter(operations.values())
        if len(counts) > 1:
            odd, usual = counts.most_common()[-1][0], counts.most_common()[0][0]
            rank = min(rank for rank, name in operations.items() if name == odd)
            return MissingRank(
                rank, 0.88, f"by its flight record it called {odd} where others called {usual}"
            )
    missing = sorted(set(range(world)) - {dump.rank for dump in dumps})
    if dumps and len(missing) == 1 and len(dumps) >= 2:
        return MissingRank(missing[0], 0.8, "it alone left no flight record")
    return None


def _silent(ends: Sequence[RankEnd]) -> MissingRank | None:
    quiet = [end for end in ends if end.kind != "timeout"]
    if not quiet or len(quiet) == len(ends):
        return None
    # Who gives up closes its connections (gloo): ranks that lost theirs then had come to the collective, too.
    absent = [end for end in quiet if end.kind != "lost-peer"]
    quiet = absent or quiet
    if len(quiet) == 1:
        early = (
            f", and ended before with exit code {quiet[0].rank.exit_code}" if quiet[0].kind == "fine" else ""
        )
        alone = "neither a timeout nor a lost connection" if absent else "no timeout"
        return MissingRank(quiet[0].rank.rank, 0.85, f"it alone reports {alone}{early}")
    fine = [end for end in quiet if end.kind == "fine"]
    if fine and len(fine) <= len(ends) / 2:
        first = min(fine, key=lambda end: (end.rank.ended or 0, end.rank.rank))
        return MissingRank(
            first.rank.rank,
            0.8,
            f"it ended with exit code {first.rank.exit_code} while others still waited for it",
        )
    stopped = sorted((end.rank.log.mtime, end.rank.rank) for end in quiet if end.rank.log.mtime is not None)
    unseen = [end.rank.rank for end in quiet if end.rank.log.mtime is None]
    if unseen:
        return MissingRank(unseen[0], 0.7, "it never wrote anything")
    if len(stopped) >= 2 and stopped[1][0] - stopped[0][0] > _APART_S:
        return MissingRank(
            stopped[0][1], 0.75, f"of {len(quiet)} ranks that report no timeout its log stopped first"
        )
    enqueued = _behind([end for end in ends if end.kind == "timeout"])
    if enqueued and len(quiet) > len(ends) / 2:
        return enqueued
    nodes = {end.rank.host for end in quiet}
    place = f", all on {quiet[0].rank.host}" if len(nodes) == 1 and quiet[0].rank.host else ""
    rank = min(end.rank.rank for end in quiet)
    return MissingRank(
        rank, 0.5, f"{len(quiet)} ranks report no timeout{place}; which of them hung first is not known"
    )


def _behind(ends: Sequence[RankEnd]) -> MissingRank | None:
    """Return the rank whose last enqueued work is lower than that of the others of its group."""
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    for end in ends:
        if end.reason is not None and end.reason.groups.get("enqueued", "").lstrip("-").isdecimal():
            name = end.reason.groups.get("pg", "").strip()
            groups[name][end.rank.rank] = int(end.reason.groups["enqueued"])
    for numbers in sorted(groups.values(), key=len, reverse=True):
        least, most = min(numbers.values()), max(numbers.values())
        behind = [rank for rank, number in numbers.items() if number == least]
        if least < most and len(behind) <= len(numbers) / 2:
            return MissingRank(min(behind), 0.8, f"its last enqueued work is {least}, that of others {most}")
    return None
