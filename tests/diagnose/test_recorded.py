"""Ends that the run itself recorded: hangs, checkpoints and supervisor decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.failures import Left, diagnose_run

HANG = {"event": "hang", "attempt": 0, "time": 1_795_000_500.5, "rank": 1, "node": "n1",
        "summary": "all ranks wrote nothing for 18 s"}  # fmt: skip


@pytest.mark.parametrize("name", ["hang", "attempt_ended"])
@pytest.mark.parametrize(("code", "signal"), [(137, 9), (143, 15)])
def test_a_hang_recorded_by_the_supervisor_is_the_cause(
    tmp_path: Path, name: str, code: int, signal: int
) -> None:
    events = [{**HANG, "attempt": 1, "rank": 0}, {**HANG, "event": name, "cause": "hang"}]
    result = diagnose_run(
        tmp_path, Left(code=code, signal=signal), Left(code=code, signal=signal), events=events
    )
    assert (result.cause, result.rank, result.node) == ("hang", 1, "n1")
    assert result.summary == HANG["summary"]
    assert result.evidence[0].text == "hang: all ranks wrote nothing for 18 s"


def test_a_cause_recorded_by_the_supervisor_is_used_without_other_evidence(tmp_path: Path) -> None:
    event = {
        "event": "attempt_ended",
        "attempt": 0,
        "cause": "preempted",
        "blame": "site",
        "summary": "gave way",
    }
    ended = Left(code=143, signal=15, told_to_end=True)
    result = diagnose_run(tmp_path, ended, events=[event], state="UNKNOWN")
    assert (result.cause, result.blame, result.summary) == ("preempted", "site", "gave way")


def test_ranks_that_ended_with_85_are_reported_as_checkpointed(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left("saved", 85), Left("saved", 85), first=(0, 85), exit_code=85)
    assert result.cause == "checkpointed"
    assert "dtslurm resubmit 17 --from-checkpoint" in result.advice
    assert result.followed_by[0].what == "saved a checkpoint and ended with 85"


def test_sacct_is_not_advised_without_accounting(tmp_path: Path) -> None:
    killed = Left(code=137, signal=9)
    assert "sacct -j 17" in diagnose_run(tmp_path / "a", killed).advice
    assert "sacct" not in diagnose_run(tmp_path / "b", killed, accounting=False).advice
