"""Filters and sorts the rows of the board and folds job arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from dtslurm.model.values import dataclass
from dtslurm.services.observe.run_list import JobRow

SORTS: tuple[str, ...] = ("newest", "state", "name", "job", "cluster", "time", "progress", "size")
_STATE_ORDER = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PENDING", "UNKNOWN")


@dataclass(frozen=True)
class Arrangement:
    """The user's filter and sort settings.

    Attributes:
        filter_text: words that must occur in a row; a word with a leading ``!`` must not occur.
        sort: one of ``SORTS``.
        expanded: tokens of arrays whose tasks are shown.
    """

    filter_text: str = ""
    hide_ended: bool = False
    sort: str = "newest"
    reverse: bool = False
    expanded: frozenset[str] = frozenset()


def arrange(rows: Sequence[JobRow], arrangement: Arrangement) -> list[JobRow]:
    """Return the rows to show; tasks follow their array, and a matching task also shows its array."""
    top_rows: list[JobRow] = []
    tasks: dict[str, list[JobRow]] = {}
    for row in rows:
        if row.task is None:
            top_rows.append(row)
        else:
            tasks.setdefault(row.token, []).append(row)
    filter_words = arrangement.filter_text.lower().split()
    visible_rows = []
    for row in sorted(top_rows, key=_choose_sort_key(arrangement.sort), reverse=arrangement.reverse):
        matching_tasks = [
            task for task in tasks.get(row.token, ()) if _matches(task, filter_words, arrangement)
        ]
        if not (_matches(row, filter_words, arrangement) or matching_tasks):
            continue
        visible_rows.append(row)
        if row.token in arrangement.expanded:
            visible_rows += matching_tasks
    return visible_rows


def _matches(row: JobRow, filter_words: Collection[str], arrangement: Arrangement) -> bool:
    if arrangement.hide_ended and row.over:
        return False
    if not filter_words:
        return True
    text = " ".join(
        (row.state, row.name, row.job_id, row.cluster, row.nodelist, row.about, row.reason)
    ).lower()
    return all(
        (word[1:] not in text) if word.startswith("!") and word[1:] else word in text for word in filter_words
    )


def _choose_sort_key(sort: str) -> Callable[[JobRow], Any]:
    keys: dict[str, Callable[[JobRow], Any]] = {
        "newest": lambda row: -row.created,
        "state": lambda row: (_state_sort_key(row), -row.created),
        "name": lambda row: (row.name, -row.created),
        "job": lambda row: (len(row.job_id), row.job_id),
        "cluster": lambda row: (row.cluster, -row.created),
        "time": lambda row: -(row.start or 0),
        "progress": lambda row: -((row.forecast.share or 0.0) if row.forecast else -1.0),
        "size": lambda row: (-(row.gpus or 0), -(row.nodes or 0), -row.ranks),
    }
    return keys.get(sort, keys["newest"])


def _state_sort_key(row: JobRow) -> tuple[int, str]:
    if row.state in _STATE_ORDER:
        return _STATE_ORDER.index(row.state), ""
    return (len(_STATE_ORDER) if not row.ok else len(_STATE_ORDER) + 1), row.state
