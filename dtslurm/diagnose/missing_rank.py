"""Find the rank that others waited for in a collective that did not complete."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dtslurm.diagnose.findings import Dump
from dtslurm.diagnose.reasons import RankEnd

_SKEW_S = 10.0  # the clocks of two nodes may differ by this time


class MissingRank(NamedTuple):
    """The rank that did not join the collective.

    Attributes:
        rank: the rank.
        confidence: from 0 to 1.
        why: the evidence, in words.
    """

    rank: int
    confidence: float
    why: str


def find(ends: Sequence[RankEnd], dumps: Sequence[Dump]) -> MissingRank | None:
    """Return the rank that the others waited for, or None without evidence.

    The evidence is tried in this order: ranks that a barrier names as missing; flight recorder dumps; the
    only rank that reports no timeout; among several such ranks, the one whose log stopped first; the rank
    with the lowest last enqueued work.
    """
    return (
        _find_named_by_barrier(ends)
        or _find_by_dumps(dumps, len(ends))
        or _find_without_timeout(ends)
        or _find_lowest_enqueued(ends)
    )


def _find_named_by_barrier(ends: Sequence[RankEnd]) -> MissingRank | None:
    counts: Counter[int] = Counter()
    for end in ends:
        if end.kind == "timeout" and end.reason:
            counts.update(int(word) for word in re.findall(r"\d+", end.reason.groups.get("missing", "")))
    existing_ranks = {end.rank.rank for end in ends}
    missing = sorted(rank for rank in counts if rank in existing_ranks)
    if not missing:
        return None
    other_ranks_text = f", like {len(missing) - 1} more" if len(missing) > 1 else ""
    return MissingRank(
        missing[0], 0.9, f"the barrier reports that this rank did not arrive{other_ranks_text}"
    )


def _find_by_dumps(dumps: Sequence[Dump], world_size: int) -> MissingRank | None:
    """Return the rank that enqueued the fewest collectives, or called another operation than the others.

    The dumps are compared by process group, the largest group first.
    """
    enqueued_by_group: dict[str, dict[int, int]] = defaultdict(dict)
    stuck_operations: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for dump in dumps:
        for group, group_state in dump.groups.items():
            enqueued_by_group[group][dump.rank] = int(group_state.get("enqueued", -1))
            if isinstance(group_state.get("stuck"), dict):
                stuck_operations[group, group_state["stuck"]["seq"]][dump.rank] = str(
                    group_state["stuck"].get("op", "")
                )
    for _, number_by_rank in sorted(enqueued_by_group.items(), key=lambda item: -len(item[1])):
        min_number, max_number = min(number_by_rank.values()), max(number_by_rank.values())
        lagging_ranks = [rank for rank, number in number_by_rank.items() if number == min_number]
        if min_number < max_number and len(lagging_ranks) <= len(number_by_rank) / 2:
            return MissingRank(
                min(lagging_ranks),
                0.92,
                (
                    f"its flight record ends at collective {min_number}, "
                    f"the records of other ranks at {max_number}"
                ),
            )
    for operations in stuck_operations.values():
        counts = Counter(operations.values())
        if len(counts) > 1:
            rare_operation, usual_operation = counts.most_common()[-1][0], counts.most_common()[0][0]
            rank = min(rank for rank, name in operations.items() if name == rare_operation)
            return MissingRank(
                rank,
                0.88,
                f"according to its flight record it called {rare_operation} where other ranks called "
                f"{usual_operation}",
            )
    missing = sorted(set(range(world_size)) - {dump.rank for dump in dumps})
    if dumps and len(missing) == 1 and len(dumps) >= 2:
        return MissingRank(missing[0], 0.8, "only this rank wrote no flight record")
    return None


def _find_without_timeout(ends: Sequence[RankEnd]) -> MissingRank | None:
    """Return the missing rank among the ranks that report no timeout: the others waited for it."""
    without_timeout = [end for end in ends if end.kind != "timeout"]
    if not without_timeout or len(without_timeout) == len(ends):
        return None
    # With gloo, a rank that times out closes its connections: ranks that lost theirs had joined, too.
    without_error = [end for end in without_timeout if end.kind != "lost-peer"]
    without_timeout = without_error or without_timeout
    if len(without_timeout) == 1:
        exit_note = (
            f", and it had ended with exit code {without_timeout[0].rank.exit_code}"
            if without_timeout[0].kind == "fine"
            else ""
        )
        missing_report = "neither a timeout nor a lost connection" if without_error else "no timeout"
        return MissingRank(
            without_timeout[0].rank.rank, 0.85, f"only this rank reports {missing_report}{exit_note}"
        )
    exited = [end for end in without_timeout if end.kind == "fine"]
    if exited and len(exited) <= len(ends) / 2:
        first_end = min(exited, key=lambda end: (end.rank.ended or 0, end.rank.rank))
        return MissingRank(
            first_end.rank.rank,
            0.8,
            f"it ended with exit code {first_end.rank.exit_code} while other ranks still waited for it",
        )
    last_writes = sorted(
        (end.rank.log.mtime, end.rank.rank) for end in without_timeout if end.rank.log.mtime is not None
    )
    never_wrote = [end.rank.rank for end in without_timeout if end.rank.log.mtime is None]
    if never_wrote:
        return MissingRank(never_wrote[0], 0.7, "it never wrote output")
    if len(last_writes) >= 2 and last_writes[1][0] - last_writes[0][0] > _SKEW_S:
        return MissingRank(
            last_writes[0][1],
            0.75,
            f"among {len(without_timeout)} ranks without a timeout, its log stopped first",
        )
    enqueued = _find_lowest_enqueued([end for end in ends if end.kind == "timeout"])
    if enqueued and len(without_timeout) > len(ends) / 2:
        return enqueued
    nodes = {end.rank.host for end in without_timeout}
    host_note = (
        f", all on {without_timeout[0].rank.host}" if len(nodes) == 1 and without_timeout[0].rank.host else ""
    )
    rank = min(end.rank.rank for end in without_timeout)
    return MissingRank(
        rank,
        0.5,
        f"{len(without_timeout)} ranks report no timeout{host_note}; which of them hung first is not known",
    )


def _find_lowest_enqueued(ends: Sequence[RankEnd]) -> MissingRank | None:
    """Return the rank whose last enqueued work is lower than that of the others in its process group."""
    enqueued_by_group: dict[str, dict[int, int]] = defaultdict(dict)
    for end in ends:
        if end.reason is not None and end.reason.groups.get("enqueued", "").lstrip("-").isdecimal():
            name = end.reason.groups.get("pg", "").strip()
            enqueued_by_group[name][end.rank.rank] = int(end.reason.groups["enqueued"])
    for number_by_rank in sorted(enqueued_by_group.values(), key=len, reverse=True):
        min_number, max_number = min(number_by_rank.values()), max(number_by_rank.values())
        lagging_ranks = [rank for rank, number in number_by_rank.items() if number == min_number]
        if min_number < max_number and len(lagging_ranks) <= len(number_by_rank) / 2:
            return MissingRank(
                min(lagging_ranks),
                0.8,
                f"its last enqueued work is {min_number}, that of other ranks {max_number}",
            )
    return None
