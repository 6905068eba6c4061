"""What the threads behind the dashboard tell of what goes wrong in them."""

from __future__ import annotations

import queue

from dtslurm.dashboard.feed import Feed, Notification
from dtslurm.services.wiring.context import Context


def test_a_fault_of_our_own_is_told_and_not_lost_behind_the_screen() -> None:
    def broken() -> Context:
        raise KeyError("profile")

    feed, told = Feed(broken, lambda _: ()), queue.SimpleQueue[object]()
    feed.start(told.put)
    word = told.get(timeout=600)
    assert isinstance(word, Notification)
    assert word.bad
    assert "KeyError: 'profile'" in word.text
