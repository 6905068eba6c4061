"""Describe the messages of a run that could not be sent. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtslurm.worker.notify.messages import FAILED, SENT

_MAX_TEXT = 200


def describe_unsent(events: Iterable[Mapping[str, Any]]) -> str:
    """Return which messages were not sent, and why the last try failed; empty if no try failed."""
    last_results: dict[tuple[str, str], Mapping[str, Any]] = {}
    left = ""
    for event in events:
        if event.get("event") in {SENT, FAILED}:
            last_results[str(event.get("message")), str(event.get("address"))] = event
            left = ""
        elif event.get("event") == "messages_left":
            left = f"the job could not send messages: {str(event.get('problem'))[:_MAX_TEXT]}"
    unsent = [event for event in last_results.values() if event.get("event") == FAILED]
    if not unsent:
        return left
    names = ", ".join(dict.fromkeys(_shorten(event.get("about")) for event in unsent))
    last = unsent[-1]
    return f"not sent to {_shorten(last.get('to'))} (the job {names}): {_shorten(last.get('problem'))}"


def _shorten(value: object) -> str:
    return str(value)[:_MAX_TEXT]
