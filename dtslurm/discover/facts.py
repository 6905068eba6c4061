"""Facts about a cluster: values for its profile, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, TypeAlias

from dtslurm.model.values import dataclass

Value: TypeAlias = str | int | float | bool | tuple[str, ...]
Confidence = Literal["sure", "likely", "guess"]


@dataclass(frozen=True)
class Fact:
    """One value of a profile.

    Attributes:
        key: the path of the value in the profile, such as ``("slurm", "partition")``.
        evidence: the source of the value, in words.
        sure: ``sure`` if the cluster reported the value, ``likely`` if it follows from a report, ``guess`` if
            the user of the profile must check it.
    """

    key: tuple[str, ...]
    value: Value
    evidence: str
    sure: Confidence = "sure"

    @property
    def name(self) -> str:
        """The key as one dotted string."""
        return ".".join(self.key)

    @property
    def text(self) -> str:
        """The value as the profile loader reads it."""
        return text_of(self.value)


def text_of(value: Value) -> str:
    """Return a value as text. Values with equal texts are equal in a profile."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class DiscoveredCluster:
    """All facts that were discovered about a cluster.

    Attributes:
        remarks: comment lines on facts without a profile key, by section ("" for the head of the file).
        notices: messages to print to the user now.
    """

    facts: tuple[Fact, ...] = ()
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def __add__(self, other: DiscoveredCluster) -> DiscoveredCluster:
        """Return the facts of both; if both have a value for a key, the value of ``other`` is used."""
        facts = {fact.key: fact for fact in (*self.facts, *other.facts)}
        remarks_by_section: dict[str, list[str]] = {}
        for section, lines in (*self.remarks.items(), *other.remarks.items()):
            remarks_by_section.setdefault(section, []).extend(lines)
        return DiscoveredCluster(tuple(facts.values()), remarks_by_section, (*self.notices, *other.notices))

    def value(self, *key: str) -> Any:
        """Return the value of a key, or None if there is none."""
        return next((fact.value for fact in self.facts if fact.key == key), None)

    def text_of(self, name: str) -> str:
        """Return the text of the value with this dotted key, or "" if there is none."""
        return next((fact.text for fact in self.facts if fact.name == name), "")

    def below(self, *key: str) -> list[Fact]:
        """Return the facts whose keys begin with these names: all values of a section of the profile."""
        return [fact for fact in self.facts if fact.key[: len(key)] == key]


def join_names(names: Iterable[str], max_names: int = 6) -> str:
    """Return names joined by commas, cut off after ``max_names`` names."""
    all_names = list(names)
    remainder = f" and {len(all_names) - max_names} more" if len(all_names) > max_names else ""
    return ", ".join(all_names[:max_names]) + remainder
