"""Iteration in chunks, so that long work does not block a user interface in the same interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

PIECE = 256
Rest = Callable[[], None]
_T = TypeVar("_T")


def chunked(items: Iterable[_T], yield_control: Rest | None) -> Iterator[_T]:
    """Yield the items, and call ``yield_control`` after every `PIECE` items to let other work run."""
    for number, item in enumerate(items, 1):
        yield item
        if yield_control is not None and number % PIECE == 0:
            yield_control()
