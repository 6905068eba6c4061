"""What was found of a cluster, each value with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, TypeAlias

from dtslurm.model.values import dataclass

Value: TypeAlias = str | int | float | bool | tuple[str, ...]
Sure = Literal["sure", "likely", "guess"]


@dataclass(frozen=True)
class Fact:
    """One value of a profile.

    Attributes:
        key: where it stands in the profile, such as ``("slurm", "partition")``.
        evidence: what told it, in words.
        sure: ``sure`` was said by the machine itself, ``likely`` follows from what it said, a ``guess`` is to
            be looked at by whoever uses the profile.
    """

    key: tuple[str, ...]
    value: Value
    evidence: str
    sure: Sure = "sure"

    @property
    def name(self) -> str:
        """The key as one word."""
        return ".".join(self.key)

    @property
    def text(self) -> str:
        """The value as a profile's loader reads it."""
        return text_of(self.value)


def text_of(value: Value) -> str:
    """Return a value as text; equal texts are equal values to a profile."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class DiscoveredCluster:
    """All that was found.

    Attributes:
        remarks: what a profile has no key for, by the section it belongs to ("" for the head); whole lines.
        notices: what the person who asked should know now.
    """

    facts: tuple[Fact, ...] = ()
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def __add__(self, other: DiscoveredCluster) -> DiscoveredCluster:
        """Return both; where both have a value, the other's holds."""
        facts = {fact.key: fact for fact in (*self.facts, *other.facts)}
        remarks: dict[str, list[str]] = {}
        for where, lines in (*self.remarks.items(), *other.remarks.items()):
            remarks.setdefault(where, []).extend(lines)
        return DiscoveredCluster(tuple(facts.values()), remarks, (*self.notices, *other.notices))

    def value(self, *key: str) -> Any:
        """Return a key's value, None without one."""
        return next((fact.value for fact in self.facts if fact.key == key), None)

    def text_of(self, name: str) -> str:
        """Return a value by its key as one word, empty without one."""
        return next((fact.text for fact in self.facts if fact.name == name), "")

    def below(self, *key: str) -> list[Fact]:
        """Return the facts below a key."""
        return [fact for fact in self.facts if fact.key[: len(key)] == key]


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return names in a row, cut off where they are many."""
    known = list(names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest
