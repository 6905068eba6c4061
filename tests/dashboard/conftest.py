"""A fixed time zone, a colour terminal and dialogs that are read at once, for the tests of the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

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
