"""Messages to the user about a request, and values with the messages of their checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Generic, Literal, TypeVar

from dtslurm.model.values import dataclass

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Diagnostic:
    """A message to the user in one line: an error prevents the job, a note does not.

    Attributes:
        hint: what to do; empty if the message contains it.
    """

    level: Literal["error", "note"]
    message: str
    hint: str = ""

    def __str__(self) -> str:
        """Return the message, with the hint in parentheses."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class HasDiagnostics:
    """The messages of ``diagnostics`` by their level."""

    diagnostics: Sequence[Diagnostic]

    @property
    def problems(self) -> list[str]:
        """The texts of the errors."""
        return [str(item) for item in self.diagnostics if item.level == "error"]

    @property
    def notices(self) -> list[str]:
        """The texts that do not prevent the job."""
        return [str(item) for item in self.diagnostics if item.level == "note"]


@dataclass(frozen=True)
class Checked(HasDiagnostics, Generic[_Value]):
    """A value, and the diagnostics of its checks."""

    value: _Value
    diagnostics: Sequence[Diagnostic] = ()


@dataclass
class Diagnostics(HasDiagnostics):
    """The diagnostics of many checks, so that one error can list every problem."""

    diagnostics: list[Diagnostic] = field(default_factory=list)

    def take(self, checked: Checked[_Value]) -> _Value:
        """Add the diagnostics of a value's checks, and return the value."""
        self.diagnostics += checked.diagnostics
        return checked.value

    def add(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Add the diagnostics of a check."""
        self.diagnostics += diagnostics

    def error(self, *messages: str) -> None:
        """Add errors."""
        self.diagnostics += errors(messages)

    def note(self, *messages: str) -> None:
        """Add notes."""
        self.diagnostics += notes(messages)


def errors(messages: Iterable[str], hint: str = "") -> tuple[Diagnostic, ...]:
    """Return an error for each message, all with the same hint."""
    return tuple(Diagnostic("error", message, hint) for message in messages)


def notes(messages: Iterable[str]) -> tuple[Diagnostic, ...]:
    """Return a note for each message."""
    return tuple(Diagnostic("note", message) for message in messages)
