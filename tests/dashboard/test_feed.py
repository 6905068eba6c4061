"""Errors in the threads behind the dashboard."""

from __future__ import annotations

import queue

from dtslurm.dashboard.feed import Feed, Notification
from dtslurm.services.wiring.context import Context


def test_an_exception_in_a_feed_thread_is_posted_as_notification() -> None:
    def broken() -> Context:
        raise KeyError("profile")

    feed, result = Feed(broken, lambda _: ()), queue.SimpleQueue[object]()
    feed.start(result.put)
    word = result.get(timeout=600)
    assert isinstance(word, Notification)
    assert word.bad
    assert "KeyError: 'profile'" in word.text
