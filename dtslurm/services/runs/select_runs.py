"""Filter runs by state and time, and sort them."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.state import JobState, StateFlag
from dtslurm.presentation.states import STALLED
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import RunView
from dtslurm.suggestions import list_nearest, suggest_name

SORTS = ("age", "name", "state", "time")
_STATES = (
    *(state.value for state in JobState),
    STALLED,
    StateFlag.COMPLETING.value,
    StateFlag.CONFIGURING.value,
)


def parse_states(text: str) -> frozenset[str]:
    """Parse a list of states such as ``failed,timeout``; empty text yields no states.

    Raises:
        RequestInvalid: the list contains an unknown state.
    """
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    unknown_names = [name for name in names if name not in _STATES]
    if unknown_names:
        name = unknown_names[0]
        raise RequestInvalid(
            [f"--state {name}: unknown state{suggest_name(name, _STATES)} ({list_nearest(name, _STATES)})"]
        )
    return frozenset(names)


def select_runs(
    views: Sequence[RunView], states: frozenset[str], ended_since: float | None, sort: str, now: float
) -> list[RunView]:
    """Return the runs that are in one of ``states`` and did not end before ``ended_since``, sorted.

    Args:
        states: names of states as ``status`` shows them; empty for all.
        ended_since: seconds since the epoch; None for no limit.
        sort: one of ``SORTS``; ``age`` is the newest first, ``time`` the longest first.
    """
    matches = [
        view
        for view in views
        if _has_state(view, states) and (ended_since is None or _end_or_now(view, now) >= ended_since)
    ]
    if sort == "name":
        return sorted(matches, key=lambda view: view.record.name)
    if sort == "state":
        return sorted(matches, key=lambda view: _STATES.index(_first_state(view)))
    if sort == "time":
        return sorted(matches, key=lambda view: -_longest_duration_s(view, now))
    return sorted(matches, key=lambda view: -view.record.created_at)


def _has_state(view: RunView, states: frozenset[str]) -> bool:
    return not states or any(
        states & {view.word_of(status), status.word, status.state.value} for status in view.statuses
    )


def _first_state(view: RunView) -> str:
    return min(
        (status.state.value for status in view.statuses), key=_STATES.index, default=JobState.UNKNOWN.value
    )


def _end_or_now(view: RunView, now: float) -> float:
    """Return when a run ended; ``now`` if it has not ended, its submission time if the end is unknown."""
    end_times = [status.end_time for status in view.statuses if status.end_time is not None]
    if not view.terminal:
        return now
    return max(end_times, default=view.record.created_at)


def _longest_duration_s(view: RunView, now: float) -> float:
    """Return the duration of a run in seconds; for an array, of the longest task."""
    run_times = [measure_view(view, status) for status in view.statuses]
    return max((part.duration_s(now) for part in run_times if part is not None), default=0.0)
