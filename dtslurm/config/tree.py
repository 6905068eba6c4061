"""A file's keys and values as they were written, each with its place.

Named tuples, because making a frozen dataclass costs a millisecond and every command reads a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias


class Problem(NamedTuple):
    """One thing wrong with a file: where (``line`` counts from 1), which key, and what."""

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
    """One value; ``text`` is None for ``null``, ``~`` and for nothing at all (then ``written`` is false)."""

    source: str
    line: int
    text: str | None
    written: bool = True


class Items(NamedTuple):
    """A list."""

    source: str
    line: int
    items: tuple[Node, ...] = ()


class MappingEntry(NamedTuple):
    """A key of a mapping, at ``line`` of ``source``, and what it holds."""

    source: str
    line: int
    value: Node


class Table(NamedTuple):
    """A mapping, in the order written."""

    source: str
    line: int
    entries: Mapping[str, MappingEntry] = MappingProxyType({})


Node: TypeAlias = Scalar | Items | Table
