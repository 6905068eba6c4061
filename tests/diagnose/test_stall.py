"""When a running job is called stalled, and when not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtslurm.diagnose.stall import judge_activity
from dtslurm.model.runs.activity import Activity, NodeActivity

NOW = 1_800_000_000.0


def node(quiet: float, *ranks: int, **ages: Any) -> NodeActivity:
    """A node whose ranks did nothing for so long; work that is younger is given by its kind and age."""
    times = {kind: NOW - ages.pop(kind, quiet) for kind in ("output", "cpu", "children", "io", "gpu")}
    known = {
        "time": NOW - 2,
        "ranks": ranks,
        "seen": ranks,
        "world_size": 4,
        "learned": True,
        "longest_s": 9.0,
    }
    return NodeActivity(**{**known, **times, **ages})


def judged(*nodes: NodeActivity, world_size: int = 4) -> Activity:
    found = judge_activity(nodes, world_size, NOW)
    assert found is not None
    return found


def test_a_job_whose_ranks_do_nothing_is_stalled_since_their_last_work() -> None:
    found = judged(node(300, 0, 1), node(220, 2, 3))
    assert (found.stalled, found.since, found.quiet_s) == (True, NOW - 220, 220)
    assert found.summary == "no step, output or activity of any rank for 3m40s; the longest pause before: 9s"
    brief = judged(node(220, 0, 1, 2, 3, longest_s=0.0))
    assert brief.summary == "no step, output or activity of any rank for 3m40s"


@pytest.mark.parametrize("kind", ["output", "cpu", "children", "io", "gpu"])
def test_one_rank_that_works_is_enough(kind: str) -> None:
    assert not judged(node(250, 0, 1), node(250, 2, 3, **{kind: 4})).stalled


def test_a_pause_of_usual_length_is_none() -> None:
    assert not judged(node(50, 0, 1, 2, 3)).stalled
    assert judged(node(70, 0, 1, 2, 3)).stalled
    assert not judged(node(200, 0, 1, 2, 3, longest_s=50.0)).stalled  # as an evaluation took before
    assert judged(node(260, 0, 1, 2, 3, longest_s=50.0)).stalled


def test_ranks_that_spin_in_a_collective_are_stalled_too_but_later() -> None:
    assert not judged(node(290, 0, 1, 2, 3, cpu=3)).stalled
    found = judged(node(400, 0, 1, 2, 3, cpu=3))
    assert (found.stalled, found.quiet_s) == (True, 400)
    assert "keep their CPUs busy" in found.summary


def test_before_training_has_begun_there_is_more_patience() -> None:
    start = {"learned": False, "longest_s": 0.0}
    assert not judged(node(200, 0, 1, 2, 3, **start)).stalled
    assert judged(node(310, 0, 1, 2, 3, **start)).stalled
    assert not judged(node(5000, 0, 1, 2, 3, cpu=3, **start)).stalled


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [node(400, 0, 1)],  # nothing is known of two ranks
        [node(400, 0, 1), node(400, 2, 3, time=NOW - 200)],  # a sampler that is gone
        [node(400, 0, 1, seen=(0, 1, 2, 3), ranks=())],  # all have ended
    ],
)
def test_without_evidence_of_every_rank_nothing_is_said(nodes: list[NodeActivity]) -> None:
    assert judge_activity(nodes, 4, NOW) is None


def test_a_node_whose_ranks_have_all_ended_keeps_nothing_back() -> None:
    left = node(900, seen=(2, 3), time=NOW - 900, over=True)
    assert judged(node(220, 0, 1), left).stalled
    assert judge_activity([left], 4, NOW) is None


def test_a_world_of_another_size_since_a_restart_counts() -> None:
    assert judge_activity([node(220, 0, 1)], 2, NOW) is None  # the ranks tell of four
    assert judged(node(220, 0, 1, world_size=2), world_size=4).stalled
    assert judged(node(220, 0, 1, world_size=None), world_size=2).stalled


def test_a_rank_that_waits_for_its_child_is_named() -> None:
    waits = {0: ("child", "git")}
    assert judged(node(220, 0, 1, 2, 3, waits=waits)).summary == (
        "no step, output or activity of any rank for 3m40s; rank 0 waits for its child git; "
        "the longest pause before: 9s"
    )
    compiling = judged(node(220, 0, 1, 2, 3, children=1, waits={0: ("child", "cc1plus")}))
    assert (compiling.stalled, compiling.summary) == (
        False, "no output for 3m40s; rank 0 waits for its child cc1plus",
    )  # fmt: skip
    usual = judged(node(20, 0, 1, 2, 3, children=1, waits={0: ("child", "cc1plus")}))
    assert usual.summary == ""


def test_a_stopped_rank_is_named_before_others() -> None:
    many = dict.fromkeys(range(3), ("child", "sh"))
    found = judged(node(220, 0, 1, 2, 3, waits={**many, 3: ("stopped", "")}))
    assert (
        "; rank 3 is stopped; rank 0 waits for its child sh; 2 more ranks wait in the same way;"
    ) in found.summary
    blocked = judged(replace(node(220, 0, 1, 2, 3), waits={2: ("blocked", ""), 1: ("new kind", "")}))
    assert "; rank 2 is blocked in the kernel;" in blocked.summary
