"""``dtslurm profile --with nsys`` restarts nothing without confirmation."""

from __future__ import annotations

import sys
from typing import Any

import click
import pytest

from dtslurm.cli import nsys_restart
from dtslurm.errors import RequestInvalid


class Ranks:
    """What happens to the ranks of a job, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_below, self.have_steps, self.answer, self.on_terminal = False, True, True, True
        self.deeds: list[str] = []
        monkeypatch.setattr(nsys_restart, "ranks_are_below_nsys", lambda _: self.run_below)
        monkeypatch.setattr(nsys_restart, "restart_below_nsys", self.restart)
        monkeypatch.setattr(nsys_restart, "record_ranks", self.record)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: self.on_terminal)
        monkeypatch.setattr(click, "confirm", self.confirm)

    def confirm(self, question: str, *, default: bool, err: bool) -> bool:
        assert "Restart the attempt of job 17?" in question
        assert "since its last checkpoint" in question
        assert (default, err) == (False, True)
        self.deeds.append("asked")
        return self.answer

    def restart(self, _: Any) -> bool:
        self.deeds.append("restarted")
        return self.have_steps

    def record(self, _: Any, seconds: int) -> list[Any]:
        self.deeds.append(f"recorded {seconds} s")
        return []

    def profile(self, *, yes: bool = False) -> None:
        target: Any = type("Target", (), {"job": "17"})()
        nsys_restart.record_with_nsys(target, 10, yes=yes)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_ranks_below_nsys_are_recorded_without_a_question(ranks: Ranks) -> None:
    ranks.run_below = True
    ranks.profile()
    assert ranks.deeds == ["recorded 10 s"]


def test_attempt_restarts_after_the_confirmation(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.profile()
    assert ranks.deeds == ["asked", "restarted", "recorded 10 s"]
    assert "a minute after its start" not in capsys.readouterr().err


def test_yes_confirms_where_nobody_can_be_asked(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.on_terminal = ranks.have_steps = False
    ranks.profile(yes=True)
    assert ranks.deeds == ["restarted", "recorded 10 s"]
    assert "recording begins now, a minute after its start" in capsys.readouterr().err


@pytest.mark.parametrize(("on_terminal", "deeds"), [(True, ["asked"]), (False, [])])
def test_nothing_is_changed_without_a_confirmation(ranks: Ranks, on_terminal: bool, deeds: list[str]) -> None:
    ranks.on_terminal, ranks.answer = on_terminal, False
    with pytest.raises(RequestInvalid, match="was not confirmed, and nothing was changed"):
        ranks.profile()
    assert ranks.deeds == deeds
