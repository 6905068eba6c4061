"""Ends that the run itself recorded: hangs, checkpoints and supervisor decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.failures import LOST, Left, diagnose_run

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


def stack_file(*frames: tuple[str, str, int], **process: Any) -> dict[str, str]:
    """Return the file in which a node's agent kept the stacks of its ranks when the hang was found."""
    named_frames = [{"function": name, "file": file, "line": line} for name, file, line in frames]
    thread = {"tid": 7, "name": "python", "state": "S", "waits": "nanosleep (hrtimer_nanosleep)"}
    look = {"pid": 7, "state": "S", "cpu": 0.0, "moved": False, "by": "py-spy", "why": [], **process}
    thread["state"] = look["state"]
    look |= {"threads": [{**thread, "frames": named_frames}, {**thread, "tid": 8, "frames": []}]}
    return {"n1.json": json.dumps({"node": "n1", "number": 1, "ranks": {"0": {}, "1": look}})}


READ_BATCH = ("read_batch", "/home/me/run/stuck.py", 11)
TRAIN = ("<module>", "/home/me/run/stuck.py", 30)
C10D = "torch/distributed/distributed_c10d.py"
ALL_REDUCE = ("all_reduce", f"/v/lib/python3.11/site-packages/{C10D}", 3252)


@pytest.mark.parametrize(
    ("stacks", "place"),
    [
        (stack_file(READ_BATCH, TRAIN), "sleeping in read_batch (run/stuck.py:11)"),
        (
            stack_file(ALL_REDUCE, READ_BATCH),
            f"in all_reduce ({C10D}:3252), called by read_batch (run/stuck.py:11)",
        ),
        (
            stack_file(READ_BATCH, state="T"),
            "stopped (by a signal or a debugger) in read_batch (run/stuck.py:11)",
        ),
    ],
)
def test_the_saved_stack_of_the_rank_that_hung_is_reported(
    tmp_path: Path, stacks: dict[str, str], place: str
) -> None:
    ranks = [Left("step 9", code=137, signal=9)] * 2
    result = diagnose_run(tmp_path, *ranks, events=[HANG], stacks=stacks)
    assert (result.cause, result.rank, result.node) == ("hang", 1, "n1")
    assert result.summary == f"{HANG['summary']}; rank 1 was {place}"
    [line] = [line for line in result.evidence if line.file == "stacks/n1.txt"]
    assert (line.rank, line.line) == (1, None)
    assert "read_batch (run/stuck.py:11)" in line.text
    assert result.advice.endswith("the complete stack is in ranks/0/stacks/n1.txt of the run directory")


@pytest.mark.parametrize(
    ("event", "stacks"),
    [
        (HANG, None),
        (HANG, stack_file()),
        (HANG, stack_file(READ_BATCH, by="none", state="")),
        (HANG, {"n1.json": "{"}),
        (HANG, {"n1.json": json.dumps({"ranks": {"1": {"threads": [{"frames": [None, {"line": "x"}]}]}}})}),
        (HANG, {"n1.json": json.dumps({"ranks": {"1": {"threads": {}}}})}),
        (HANG, {"n1.json": json.dumps({"ranks": {"1": {"threads": []}, "x": {"threads": [{}]}}})}),
        (HANG, {"n1.json": json.dumps({"ranks": [1]})}),
        ({**HANG, "node": "../stacks/n1"}, stack_file(READ_BATCH)),
        ({**HANG, "node": None}, stack_file(READ_BATCH)),
        ({**HANG, "rank": None}, stack_file(READ_BATCH)),
        ({**HANG, "rank": "1"}, stack_file(READ_BATCH)),
    ],
)
def test_a_hang_without_a_usable_stack_is_reported_as_recorded(
    tmp_path: Path, event: dict[str, Any], stacks: dict[str, str] | None
) -> None:
    ranks = [Left("step 9", code=137, signal=9)] * 2
    result = diagnose_run(tmp_path, *ranks, events=[event], stacks=stacks)
    assert (result.cause, result.summary) == ("hang", HANG["summary"])
    assert result.advice.startswith("check in the log")


def test_the_saved_stacks_of_all_ranks_are_interpreted_if_no_rank_differs(tmp_path: Path) -> None:
    lock = ("wait", "/v/lib/python3.11/site-packages/torch/utils/file_baton.py", 50)
    document = json.loads(stack_file(lock, TRAIN)["n1.json"])
    hang = {**HANG, "rank": None, "node": None}
    ranks = [Left("step 9", code=137, signal=9)] * 2
    incomplete = diagnose_run(
        tmp_path / "a", *ranks, events=[hang], stacks={"n1.json": json.dumps(document), "n2.json": "{}"}
    )
    assert incomplete.summary == HANG["summary"]
    document["ranks"]["0"] = document["ranks"]["1"]
    result = diagnose_run(tmp_path / "b", *ranks, events=[hang], stacks={"n1.json": json.dumps(document)})
    assert (result.cause, result.rank) == ("hang", None)
    assert result.summary.startswith(
        f"{HANG['summary']}; according to the stacks saved at that time, all 2 ranks (0-1) wait for the lock"
    )
    assert "delete the file lock" in result.advice


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


@pytest.mark.parametrize(
    "log", [LOST, "Traceback (most recent call last):\nValueError: the other rank is gone"]
)
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_rank_that_fails_after_another_ended_with_85_is_not_the_first_failure(
    tmp_path: Path, log: str, *, is_recorded: bool
) -> None:
    event = {"event": "attempt_ended", "attempt": 0, "cause": "checkpointed", "summary": "the ranks saved"}
    ranks = [Left("saved", 85), Left(log, 1, ended=602), Left(log, 1, ended=602)]
    events = [event] if is_recorded else []
    result = diagnose_run(tmp_path, *ranks, first=(0, 85), events=events, exit_code=85)
    assert (result.cause, result.rank, result.node) == ("checkpointed", None, None)


def test_a_rank_that_failed_before_another_ended_with_85_is_the_first_failure(tmp_path: Path) -> None:
    ranks = [Left("saved", 85), Left("Traceback (most recent call last):\nValueError: no", 1, ended=590)]
    result = diagnose_run(tmp_path, *ranks, first=(1, 1))
    assert (result.cause, result.rank) == ("python-exception", 1)


def test_a_hang_after_a_rank_ended_with_85_is_the_cause(tmp_path: Path) -> None:
    ranks = [Left("saved", 85), Left(code=137, signal=9)]
    result = diagnose_run(tmp_path, *ranks, first=(0, 85), events=[HANG])
    assert (result.cause, result.rank) == ("hang", 1)


def test_sacct_is_not_advised_without_accounting(tmp_path: Path) -> None:
    killed = Left(code=137, signal=9)
    assert "sacct -j 17" in diagnose_run(tmp_path / "a", killed).advice
    assert "sacct" not in diagnose_run(tmp_path / "b", killed, accounting=False).advice
