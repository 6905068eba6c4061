"""Which runs ended or stalled while the dashboard was open."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.logs.clean import safe
from dtslurm.model.units import duration
from dtslurm.services.observe.run_list import Board, JobRow

_MOST = 3
_LONGEST = 200


class Announcer:
    """Finds, in one board after the other, the runs that have ended or stalled since; each event once.

    A run that had ended, or stalled, when it was first seen is no event. A state that is unknown is no
    evidence of anything.
    """

    def __init__(self) -> None:
        self._alive: set[str] = set()
        self._stalled: set[str] = set()

    def read(self, board: Board) -> list[str]:
        """Return the new events in words."""
        return [text for row in board.rows if not row.unknown for text in self._events(row)]

    def _events(self, row: JobRow) -> list[str]:
        watched = row.key in self._alive
        if row.over:
            self._alive.discard(row.key)
            self._stalled.discard(row.key)
            return [ended(row)] if watched and row.task is None else []
        self._alive.add(row.key)
        if not row.stalled:
            if row.activity is not None or row.state != "RUNNING":  # no look at its ranks is no news
                self._stalled.discard(row.key)
            return []
        new = row.key not in self._stalled
        self._stalled.add(row.key)
        return [stalled(row)] if watched and new else []


def ended(row: JobRow) -> str:
    """Return how a run ended."""
    about = f": {safe(row.about)}" if row.about and not row.ok else ""
    return f"{safe(row.name)} ({safe(row.job_id)}) {row.state.lower().replace('_', ' ')}{about}"


def stalled(row: JobRow) -> str:
    """Return for how long the ranks of a run have done nothing."""
    quiet = f" for {duration(row.activity.quiet_s)}" if row.activity is not None else ""
    return f"{safe(row.name)} ({safe(row.job_id)}) stalled: its ranks have done nothing{quiet}"


def sentence(events: Sequence[str]) -> str:
    """Return events as one line without anything that a terminal acts on."""
    more = f"; and {len(events) - _MOST} more" if len(events) > _MOST else ""
    return safe("; ".join(events[:_MOST])[:_LONGEST] + more)


def terminal_notification(text: str) -> str:
    """Return the sequence OSC 9, with which terminals show a notification of the desktop."""
    return f"\x1b]9;dtslurm: {safe(text)}\x07"
