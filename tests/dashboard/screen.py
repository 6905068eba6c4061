"""Runs the dashboard on a virtual terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from dtslurm.dashboard.app import TopApp
from tests.dashboard.samples import SampleSource, app_of

Use = Callable[[Pilot[None], TopApp], Awaitable[None]]


def use_app(
    what: Use, source: SampleSource | None = None, size: tuple[int, int] = (80, 24), **values: object
) -> TopApp:
    app = app_of(source, **values)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await wait_until_stable(pilot)
            await what(pilot, app)

    asyncio.run(run())
    return app


def notification_text(app: TopApp) -> str:
    """Return the texts of the shown notifications."""
    return " | ".join(note.message for note in app._notifications)


def screen_text(app: TopApp) -> str:
    """Return the screen as text."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip)[: app.size.width] for strip in lines)


async def wait_until_shown(pilot: Pilot[None], text: str) -> None:
    """Wait until a text stands on the screen; on a busy machine it may come after `settled` returns.

    Raises:
        AssertionError: it does not come within a minute; the message is the whole screen.
    """
    assert isinstance(pilot.app, TopApp)
    for _ in range(600):
        if text in screen_text(pilot.app):
            return
        await pilot.pause(0.1)
    raise AssertionError(f"{text!r} is not shown:\n{screen_text(pilot.app)}")


async def wait_until_stable(pilot: Pilot[None]) -> None:
    """Wait until nothing changes any more; the log looks at its store ten times a second."""
    before = ""
    for _ in range(600):
        await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.11)
        assert isinstance(pilot.app, TopApp)
        now = screen_text(pilot.app)
        if now == before:
            return
        before = now
