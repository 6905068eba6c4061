"""Where a shell inside a running job can be opened."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.observe.inside import execute


@pytest.mark.parametrize(
    ("ranks", "has_terminal", "problem"),
    [
        (1, True, None),
        (2, True, "a shell runs in one place only"),
        (1, False, "a shell needs a terminal"),
    ],
)
def test_shell_needs_one_place_and_a_terminal(
    monkeypatch: pytest.MonkeyPatch, ranks: int, has_terminal: bool, problem: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: has_terminal))
    if problem is None:
        execute._check_shell(ranks, "17")
        return
    with pytest.raises(RequestInvalid, match=problem):
        execute._check_shell(ranks, "17")
