"""Long work in pieces, for who shares the interpreter with a screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

PIECE = 256
Rest = Callable[[], None]
_T = TypeVar("_T")


def chunked(items: Iterable[_T], rest: Rest | None) -> Iterator[_T]:
    """Yield the items; between some hundred of them, call ``rest``, which lets others have a turn."""
    for number, item in enumerate(items, 1):
        yield item
        if rest is not None and number % PIECE == 0:
            rest()
