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
        words: words that must occur in a row; a word with a leading ``!`` must not occur.
        sort: one of ``SORTS``.
        expanded: tokens of arrays whose tasks are shown.
    """

    words: str = ""
    hide_ended: bool = False
    sort: str = "newest"
    reverse: bool = False
    expanded: frozenset[str] = frozenset()


def arrange(rows: Sequence[JobRow], choice: Arrangement) -> list[JobRow]:
    """Return the rows to show; tasks follow their array, and a matching task also shows its array."""
    top_rows: list[JobRow] = []
    tasks: dict[str, list[JobRow]] = {}
    for row in rows:
        if row.task is None:
            top_rows.append(row)
        else:
            tasks.setdefault(row.token, []).append(row)
    words = choice.words.lower().split()
    shown = []
    for row in sorted(top_rows, key=_choose_sort_key(choice.sort), reverse=choice.reverse):
        matching_tasks = [task for task in tasks.get(row.token, ()) if _matches(task, words, choice)]
        if not (_matches(row, words, choice) or matching_tasks):
            continue
        shown.append(row)
        if row.token in choice.expanded:
            shown += matching_tasks
    return shown


def _matches(row: JobRow, words: Collection[str], choice: Arrangement) -> bool:
    if choice.hide_ended and row.over:
        return False
    if not words:
        return True
    text = " ".join(
        (row.state, row.name, row.job_id, row.cluster, row.nodelist, row.about, row.reason)
    ).lower()
    return all(
        (word[1:] not in text) if word.startswith("!") and word[1:] else word in text for word in words
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
