"""Where ranks spend their time, by the traces of their stacks."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.cli.printing.profile_rows import explain_straggler, profile_row
from dtslurm.model.runs.live import StackFrame
from dtslurm.model.runs.profile import RankProfile
from dtslurm.views.profile import TraceEvent, find_straggler, summarize

PACKAGES = "/venv/lib/python3.11/site-packages"
MAIN = ("thread (17): MainThread", "", 0)
STEP = ("step", "/home/ada/train.py", 31)
REDUCE = ("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 2810)
NEXT = ("__next__", f"{PACKAGES}/torch/utils/data/dataloader.py", 700)
SAVE = ("save", f"{PACKAGES}/torch/distributed/checkpoint/state_dict_saver.py", 100)
OWN_SET = ("__getitem__", "/home/ada/datasets/shards.py", 5)


def trace(*spans: tuple[int, tuple[tuple[str, str, int], ...]], thread: int = 1) -> list[TraceEvent]:
    """Return the events of a thread that spends so many microseconds with each stack."""
    events, now = [], 0
    for us, frames in spans:
        for begins, chosen in ((True, frames), (False, frames[::-1])):
            for function, file, line in chosen:
                frame = StackFrame(function=function, file=file, line=line)
                events.append(TraceEvent(time_us=now, thread=thread, begins=begins, frame=frame))
            now += us if begins else 0
    return events


def test_time_is_divided_into_what_the_main_thread_does() -> None:
    events = trace(
        (500, (MAIN, STEP)), (300, (MAIN, STEP, REDUCE)), (150, (MAIN, NEXT)), (50, (MAIN, SAVE, REDUCE))
    )  # fmt: skip
    side = trace((10_000, (("thread (18): Thread-1", "", 0), NEXT)), thread=2)
    profile = summarize("0", sorted([*events, *side], key=lambda event: event.time_us))
    assert profile.seconds == pytest.approx(1e-3)
    assert profile.shares == pytest.approx(
        {"compute": 0.5, "communication": 0.3, "data": 0.15, "checkpoint": 0.05}
    )
    [spot] = profile.hot_spots
    assert spot.place == "step (ada/train.py:31)"
    assert spot.share == pytest.approx(0.8)


def test_own_code_with_the_name_of_a_library_is_compute() -> None:
    profile = summarize("0", trace((100, (MAIN, OWN_SET))))
    assert profile.shares["compute"] == 1.0
    assert profile_row(profile)[-1] == "__getitem__ (datasets/shards.py:5) 100%"


def test_process_without_a_main_thread_counts_all_threads_and_an_empty_trace_nothing() -> None:
    assert summarize("0", trace((100, (("thread (1): worker", "", 0), STEP)))).seconds == pytest.approx(1e-4)
    empty = summarize("0", [])
    assert (empty.seconds, set(empty.shares.values()), empty.hot_spots) == (0.0, {0.0}, ())
    assert profile_row(empty) == ("0", "0%", "0%", "0%", "0%", "-")


def test_end_without_a_begin_is_ignored() -> None:
    frame = StackFrame(function="f", file="f.py", line=1)
    events = [TraceEvent(time_us=us, thread=1, begins=False, frame=frame) for us in (0, 5)]
    assert summarize("0", events).seconds == 0.0


def rank(label: str, communication: float, place: str = "") -> RankProfile:
    spots: Any = (type("Spot", (), {"place": place, "share": 0.5}),) if place else ()
    shares = {"compute": 1 - communication, "communication": communication, "data": 0.0, "checkpoint": 0.0}
    return RankProfile(label, 10.0, shares, spots)


def test_rank_that_the_others_wait_for_communicates_least() -> None:
    ranks = [rank("0", 0.8), rank("1", 0.05, "slow (train.py:6)"), rank("2", 0.75)]
    assert explain_straggler(ranks) == (
        "rank 1 communicates 5% of the time, rank 0 80%: the others wait for rank 1, "
        "which is mostly in slow (train.py:6)"
    )


@pytest.mark.parametrize("ranks", [[], [rank("0", 0.0)], [rank("0", 0.50), rank("1", 0.59)]])
def test_ranks_that_hardly_differ_have_no_straggler(ranks: list[RankProfile]) -> None:
    assert find_straggler(ranks) is None
    assert explain_straggler(ranks) == ""
