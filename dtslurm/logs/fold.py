"""Equal lines of many ranks as one line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import field

from dtslurm.model.jobs.job import LogLine
from dtslurm.model.values import dataclass


@dataclass
class Folded:
    """Lines of equal text; ``ranks`` is empty where the line is of no rank."""

    line: LogLine
    ranks: list[int] = field(default_factory=list)
    since: float = 0.0


class LineFolder:
    """Collects lines for a short while and folds those of equal text, each rank's own order kept.

    Args:
        window: seconds for which a line waits for others like it.
        most: lines (after folding) that are kept waiting.
    """

    def __init__(self, window: float = 0.25, most: int = 100_000) -> None:
        self._window, self._most = window, most
        self._waiting: list[Folded] = []
        self._places: dict[tuple[str, int, str | None], list[int]] = {}  # where a text waits, in order
        self._last: dict[tuple[int, str | None, int], int] = {}  # where a rank's last line waits

    def add(self, lines: Iterable[LogLine], now: float) -> None:
        """Take lines as they came, at this time (seconds of any clock)."""
        for line in lines:
            if line.rank is None:
                self._waiting.append(Folded(line, since=now))
                continue
            key = (line.text, line.attempt, line.task)
            who = (line.attempt, line.task, line.rank)
            places = self._places.get(key)
            if places is not None:
                # The first one after this rank's last line: its lines stay in their order.
                found = bisect_right(places, self._last.get(who, -1))
                if found < len(places):
                    self._waiting[places[found]].ranks.append(line.rank)
                    self._last[who] = places[found]
                    continue
            at = len(self._waiting)
            self._waiting.append(Folded(line, [line.rank], now))
            self._last[who] = at
            self._places.setdefault(key, []).append(at)

    def take(self, now: float, *, everything: bool = False) -> list[Folded]:
        """Return those that have waited long enough, in order; all if asked for, or if there are too many."""
        waiting = self._waiting
        if everything or len(waiting) >= self._most or (waiting and now - waiting[0].since >= self._window):
            self._waiting, self._places, self._last = [], {}, {}
            return waiting
        return []


def rank_set(ranks: Iterable[int]) -> str:
    """Return ranks as ``0-3,7``."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return str(numbers[0])
    from ClusterShell.RangeSet import RangeSet

    return str(RangeSet.fromlist([str(number) for number in numbers])) if numbers else ""
