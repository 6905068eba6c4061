"""What the run itself recorded of an end: a hang that was seen, ranks that saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.failures import Left, say

HANG = {"event": "hang", "attempt": 0, "time": 1_795_000_500.5, "rank": 1, "node": "n1",
        "summary": "all ranks wrote nothing for 18 s"}  # fmt: skip


@pytest.mark.parametrize("name", ["hang", "attempt_ended"])
@pytest.mark.parametrize(("code", "signal"), [(137, 9), (143, 15)])
def test_a_hang_that_the_supervisor_found_is_the_cause(
    tmp_path: Path, name: str, code: int, signal: int
) -> None:
    events = [{**HANG, "attempt": 1, "rank": 0}, {**HANG, "event": name, "cause": "hang"}]
    told = say(tmp_path, Left(code=code, signal=signal), Left(code=code, signal=signal), events=events)
    assert (told.cause, told.rank, told.node) == ("hang", 1, "n1")
    assert told.summary == HANG["summary"]
    assert told.evidence[0].text == "hang: all ranks wrote nothing for 18 s"


def test_what_the_supervisor_recorded_is_told_where_nothing_else_says_why(tmp_path: Path) -> None:
    event = {
        "event": "attempt_ended",
        "attempt": 0,
        "cause": "preempted",
        "blame": "site",
        "summary": "gave way",
    }
    ended = Left(code=143, signal=15, told_to_end=True)
    told = say(tmp_path, ended, events=[event], state="UNKNOWN")
    assert (told.cause, told.blame, told.summary) == ("preempted", "site", "gave way")


def test_ranks_that_saved_and_want_to_go_on_have_not_failed(tmp_path: Path) -> None:
    told = say(tmp_path, Left("saved", 85), Left("saved", 85), first=(0, 85), exit_code=85)
    assert told.cause == "checkpointed"
    assert "dtslurm resubmit 17 --from-checkpoint" in told.advice
    assert told.followed_by[0].what == "saved a checkpoint and ended with 85"


def test_no_accounting_is_advised_where_there_is_none(tmp_path: Path) -> None:
    killed = Left(code=137, signal=9)
    assert "sacct -j 17" in say(tmp_path / "a", killed).advice
    assert "sacct" not in say(tmp_path / "b", killed, accounting=False).advice
