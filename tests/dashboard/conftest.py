"""A fixed time zone, a colour terminal and dialogs that are read at once, for the tests of the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from textual.notifications import Notification
from textual.pilot import Pilot

from dtslurm.dashboard import dialogs


@pytest.fixture(autouse=True)
def colour_terminal_in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def dialogs_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dialog take a Yes at once: a test cannot know how long the dialog has been shown."""
    monkeypatch.setattr(dialogs, "_READING_S", -1.0)


@pytest.fixture(autouse=True)
def machine_that_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep notifications, and wait for widgets for minutes: a busy machine stands still for half a minute."""
    monkeypatch.setattr(Notification, "time_left", 3600.0)
    monkeypatch.setattr(Pilot._wait_for_screen, "__defaults__", (300.0,))
