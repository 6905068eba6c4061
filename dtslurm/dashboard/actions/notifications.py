"""Finds runs that ended or stalled while the dashboard was open."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.logs.clean import safe
from dtslurm.presentation.quantities import duration
from dtslurm.services.observe.run_list import Board, JobRow

_MAX_EVENTS = 3
_MAX_LENGTH = 200


class Announcer:
    """Finds in successive boards the runs that ended or stalled since the previous board, each event once.

    A run that had already ended or stalled in its first board causes no event. An unknown state causes no
    event.
    """

    def __init__(self) -> None:
        self._active_keys: set[str] = set()
        self._stalled_keys: set[str] = set()

    def list_new_events(self, board: Board) -> list[str]:
        """Return the new events as text."""
        return [text for row in board.rows if not row.unknown for text in self._find_events(row)]

    def _find_events(self, row: JobRow) -> list[str]:
        was_active = row.key in self._active_keys
        if row.over:
            self._active_keys.discard(row.key)
            self._stalled_keys.discard(row.key)
            return [describe_end(row)] if was_active and row.task is None else []
        self._active_keys.add(row.key)
        if not row.stalled:
            # A running job without known activity stays marked as stalled.
            if row.activity is not None or row.state != "RUNNING":
                self._stalled_keys.discard(row.key)
            return []
        is_new = row.key not in self._stalled_keys
        self._stalled_keys.add(row.key)
        return [describe_stall(row)] if was_active and is_new else []


def describe_end(row: JobRow) -> str:
    """Return a description of how a run ended."""
    reason_text = f": {safe(row.about)}" if row.about and not row.ok else ""
    return f"{safe(row.name)} ({safe(row.job_id)}) {row.state.lower().replace('_', ' ')}{reason_text}"


def describe_stall(row: JobRow) -> str:
    """Return a description of how long the ranks of a run have been idle."""
    idle_time = f" for {duration(row.activity.quiet_s)}" if row.activity is not None else ""
    return f"{safe(row.name)} ({safe(row.job_id)}) stalled: its ranks have done nothing{idle_time}"


def join_events(events: Sequence[str]) -> str:
    """Return the events as one line without terminal control sequences."""
    suffix = f"; and {len(events) - _MAX_EVENTS} more" if len(events) > _MAX_EVENTS else ""
    return safe("; ".join(events[:_MAX_EVENTS])[:_MAX_LENGTH] + suffix)


def make_terminal_notification(text: str) -> str:
    """Return the escape sequence OSC 9, which makes terminals show a desktop notification."""
    return f"\x1b]9;dtslurm: {safe(text)}\x07"
