"""Fold equal log lines of several ranks into one line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import field

from dtslurm.model.jobs.job import LogLine
from dtslurm.model.values import dataclass


@dataclass
class Folded:
    """A line that stands for all lines with the same text; ``ranks`` is empty if no rank wrote the line."""

    line: LogLine
    ranks: list[int] = field(default_factory=list)
    since: float = 0.0


class LineFolder:
    """A buffer that folds lines with equal text and preserves the order of each rank's lines.

    Args:
        window: seconds for which a line waits for equal lines of other ranks.
        most: maximum number of waiting lines (after folding).
    """

    def __init__(self, window: float = 0.25, max_waiting: int = 100_000) -> None:
        self._window, self._max_waiting = window, max_waiting
        self._waiting: list[Folded] = []
        # Indexes into `_waiting`: of the lines with a text, ascending; and of the last line of a rank.
        self._indexes_by_text: dict[tuple[str, int, str | None], list[int]] = {}
        self._last_index: dict[tuple[int, str | None, int], int] = {}

    def add(self, lines: Iterable[LogLine], now: float) -> None:
        """Add lines in the order of arrival; ``now`` is the time in seconds of any clock."""
        for line in lines:
            if line.rank is None:
                self._waiting.append(Folded(line, since=now))
                continue
            text_key = (line.text, line.attempt, line.task)
            rank_key = (line.attempt, line.task, line.rank)
            indexes = self._indexes_by_text.get(text_key)
            if indexes is not None:
                # Use the first equal line after this rank's last line, to preserve the order of its lines.
                position = bisect_right(indexes, self._last_index.get(rank_key, -1))
                if position < len(indexes):
                    self._waiting[indexes[position]].ranks.append(line.rank)
                    self._last_index[rank_key] = indexes[position]
                    continue
            index = len(self._waiting)
            self._waiting.append(Folded(line, [line.rank], now))
            self._last_index[rank_key] = index
            self._indexes_by_text.setdefault(text_key, []).append(index)

    def take(self, now: float, *, everything: bool = False) -> list[Folded]:
        """Remove and return all waiting lines in order, once the oldest has waited for ``window`` seconds.

        Return them at once if ``everything`` is true or the buffer is full, and otherwise an empty list.
        """
        waiting_lines = self._waiting
        if (
            everything
            or len(waiting_lines) >= self._max_waiting
            or (waiting_lines and now - waiting_lines[0].since >= self._window)
        ):
            self._waiting, self._indexes_by_text, self._last_index = [], {}, {}
            return waiting_lines
        return []


def rank_set(ranks: Iterable[int]) -> str:
    """Return ranks as a range set such as ``0-3,7``."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return str(numbers[0])
    from ClusterShell.RangeSet import RangeSet

    return str(RangeSet.fromlist([str(number) for number in numbers])) if numbers else ""
