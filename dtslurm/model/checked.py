"""Values with the messages of the checks that they passed or failed."""

from __future__ import annotations

from dataclasses import field
from typing import Generic, TypeVar

from dtslurm.model.values import dataclass

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Checked(Generic[_Value]):
    """A value, and what its checks found.

    Attributes:
        problems: the reasons why a job cannot run with this value, one line each.
        notices: messages to the user that do not prevent the job, one line each.
    """

    value: _Value
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass
class Messages:
    """The messages of all checks of a request, so that one error can list every problem."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def take(self, checked: Checked[_Value]) -> _Value:
        """Add the messages of a value's checks, and return the value."""
        self.problems += checked.problems
        self.notices += checked.notices
        return checked.value
