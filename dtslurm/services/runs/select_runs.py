"""Select and order runs by what the user asks for: states, time and age."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.state import JobState, StateFlag
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import STALLED, RunView
from dtslurm.suggestions import list_nearest, suggest_name

SORTS = ("age", "name", "state", "time")
_STATES = (
    *(state.value for state in JobState),
    STALLED,
    StateFlag.COMPLETING.value,
    StateFlag.CONFIGURING.value,
)


def parse_states(text: str) -> frozenset[str]:
    """Return the states that a list such as ``failed,timeout`` names; empty text names none.

    Raises:
        RequestInvalid: there is no state of that name.
    """
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in _STATES]
    if unknown:
        name = unknown[0]
        raise RequestInvalid(
            [f"--state {name}: no such state{suggest_name(name, _STATES)} ({list_nearest(name, _STATES)})"]
        )
    return frozenset(names)


def select_runs(
    found: Sequence[RunView], states: frozenset[str], since: float | None, sort: str, now: float
) -> list[RunView]:
    """Return the runs that are in one of some states and that were not over before a moment, in order.

    Args:
        states: words for states as ``status`` shows them; empty for all.
        since: seconds since the epoch; None for all times.
        sort: one of ``SORTS``; ``age`` is the newest first, ``time`` the longest first.
    """
    chosen = [
        view for view in found if _is_in(view, states) and (since is None or _last_seen(view, now) >= since)
    ]
    if sort == "name":
        return sorted(chosen, key=lambda view: view.record.name)
    if sort == "state":
        return sorted(chosen, key=lambda view: _STATES.index(_state_of(view)))
    if sort == "time":
        return sorted(chosen, key=lambda view: -_longest_s(view, now))
    return sorted(chosen, key=lambda view: -view.record.created_at)


def _is_in(view: RunView, states: frozenset[str]) -> bool:
    return not states or any(states & {view.word_of(one), one.word, one.state.value} for one in view.statuses)


def _state_of(view: RunView) -> str:
    return min((one.state.value for one in view.statuses), key=_STATES.index, default=JobState.UNKNOWN.value)


def _last_seen(view: RunView, now: float) -> float:
    """Return when a run ended; now where it is not over, or its submission where nothing tells its end."""
    ends = [one.end_time for one in view.statuses if one.end_time is not None]
    if not view.terminal:
        return now
    return max(ends, default=view.record.created_at)


def _longest_s(view: RunView, now: float) -> float:
    """Return the duration of a run, of an array that of the task that took longest."""
    times = [measure_view(view, status) for status in view.statuses]
    return max((one.duration_s(now) for one in times if one is not None), default=0.0)
