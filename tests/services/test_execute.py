"""Where a shell inside a running job can be opened."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.observe import execute


@pytest.mark.parametrize(
    ("ranks", "has_terminal", "transport", "problem"),
    [
        (1, True, "openssh", None),
        (1, True, "local", None),
        (2, True, "local", "a shell runs in one place only"),
        (1, False, "local", "a shell needs a terminal"),
        (1, True, "paramiko", "a shell on login1 needs the program ssh"),
    ],
)
def test_shell_needs_one_place_a_terminal_and_ssh(
    monkeypatch: pytest.MonkeyPatch, ranks: int, has_terminal: bool, transport: str, problem: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: has_terminal))
    link: Any = SimpleNamespace(name=transport, host="login1")
    if problem is None:
        execute._check_shell(ranks, link, "17")
        return
    with pytest.raises(RequestInvalid, match=problem):
        execute._check_shell(ranks, link, "17")
