"""Every timer of the dashboard fires, and left pages are freed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.timer import Timer
from textual.widget import Widget

from dtslurm.dashboard.app import TopApp
from tests.dashboard.screen import use_app, wait_until_stable

_SHORT_S = 0.3  # shorter ones draw all the time


class _Timers:
    """The dashboard's own timers, shortened: the intervals of those that were started and that have fired.

    Textual's own timers are left out: it stops some of them before they fire.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started: set[float] = set()
        self.fired: set[float] = set()
        intervals: dict[Timer, float] = {}
        begin, tick = Timer.__init__, Timer._tick

        def start(timer: Timer, target: Any, interval: float, **values: Any) -> None:
            own = not getattr(values.get("callback"), "__module__", "").startswith("textual")
            if own and values.get("callback") is not None:
                intervals[timer] = interval
                self.started.add(interval)
            begin(timer, target, min(interval, _SHORT_S) if own else interval, **values)

        async def fire(timer: Timer, **values: Any) -> None:
            await tick(timer, **values)
            if timer in intervals:
                self.fired.add(intervals[timer])

        patch.setattr(Timer, "__init__", start)
        patch.setattr(Timer, "_tick", fire)


def test_every_timer_of_every_screen_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = _Timers(monkeypatch)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for pane in "123456":
            await pilot.press(pane)
            await wait_until_stable(pilot)
        app.leave_job()
        await pilot.press("question_mark")
        await wait_until_stable(pilot)
        await pilot.press("escape")
        await wait_until_stable(pilot)
        for _ in range(100):
            if timers.fired == timers.started:
                break
            await pilot.pause(0.1)

    use_app(what)
    assert {0.1, 1.0, 300.0} <= timers.started
    assert timers.fired == timers.started


def live_widgets() -> list[Widget]:
    """Return all widgets of this process. Asked for its class, some other object of torch's warns."""
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), Widget)]


def test_left_pages_leave_no_widgets() -> None:
    others = live_widgets()  # of tests before this one

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for _ in range(3):
            await pilot.press("enter", "2", "4", "1")
            await wait_until_stable(pilot)
            await pilot.press("q")
            await wait_until_stable(pilot)
        left = ["not looked yet"]
        for _ in range(50):  # a page that was left ends some time later
            app._collect_garbage()
            known = {id(item) for screen in app.screen_stack for item in (screen, *screen.walk_children())}
            known |= set(map(id, others))
            left = [type(item).__name__ for item in live_widgets() if id(item) not in known]
            if not left:
                break
            await pilot.pause(0.2)
        assert left == []

    use_app(what)
