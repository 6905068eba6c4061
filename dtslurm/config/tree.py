"""The keys and values of a file as written, each with its location.

These are named tuples, because the definition of a frozen dataclass costs a millisecond at import, and every
command reads a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias


class Problem(NamedTuple):
    """A problem in a file: its location (``line`` counts from 1), the key, and the message."""

    source: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        """Return ``file:line: key: message``."""
        key = self.key if self.key.isprintable() else ascii(self.key)[1:-1]
        key = key if len(key) <= 100 else f"{key[:100]}…"
        return ": ".join(part for part in (f"{self.source}:{self.line}", key, self.message) if part)


class Scalar(NamedTuple):
    """A single value; ``text`` is None for ``null``, ``~`` and an absent value (``written`` is False)."""

    source: str
    line: int
    text: str | None
    written: bool = True


class Items(NamedTuple):
    """A list, in the order written."""

    source: str
    line: int
    items: tuple[Node, ...] = ()


class MappingEntry(NamedTuple):
    """The value of a key of a mapping, with the location of the key."""

    source: str
    line: int
    value: Node


class Table(NamedTuple):
    """A mapping, with its keys in the order of the file."""

    source: str
    line: int
    entries: Mapping[str, MappingEntry] = MappingProxyType({})


Node: TypeAlias = Scalar | Items | Table
