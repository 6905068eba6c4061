"""The conditions under which a running job counts as stalled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtslurm.diagnose.stall import judge_activity
from dtslurm.model.runs.activity import Activity, NodeActivity

NOW = 1_800_000_000.0


def idle_node(quiet: float, *ranks: int, **ages: Any) -> NodeActivity:
    """Return a node whose ranks were idle for ``quiet`` seconds, except for the kinds given with an age."""
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


def judge_nodes(*nodes: NodeActivity, world_size: int = 4) -> Activity:
    result = judge_activity(nodes, world_size, NOW)
    assert result is not None
    return result


def test_a_job_with_idle_ranks_is_stalled_since_their_last_activity() -> None:
    result = judge_nodes(idle_node(300, 0, 1), idle_node(220, 2, 3))
    assert (result.stalled, result.since, result.quiet_s) == (True, NOW - 220, 220)
    assert result.summary == "no step, output or activity of any rank for 3m40s; the longest pause before: 9s"
    brief = judge_nodes(idle_node(220, 0, 1, 2, 3, longest_s=0.0))
    assert brief.summary == "no step, output or activity of any rank for 3m40s"


@pytest.mark.parametrize("kind", ["output", "cpu", "children", "io", "gpu"])
def test_one_active_rank_prevents_a_stall(kind: str) -> None:
    assert not judge_nodes(idle_node(250, 0, 1), idle_node(250, 2, 3, **{kind: 4})).stalled


def test_a_pause_of_usual_length_is_not_a_stall() -> None:
    assert not judge_nodes(idle_node(50, 0, 1, 2, 3)).stalled
    assert judge_nodes(idle_node(70, 0, 1, 2, 3)).stalled
    assert not judge_nodes(idle_node(200, 0, 1, 2, 3, longest_s=50.0)).stalled  # as an evaluation took before
    assert judge_nodes(idle_node(260, 0, 1, 2, 3, longest_s=50.0)).stalled


def test_ranks_with_busy_cpus_are_stalled_after_a_longer_time() -> None:
    assert not judge_nodes(idle_node(290, 0, 1, 2, 3, cpu=3)).stalled
    result = judge_nodes(idle_node(400, 0, 1, 2, 3, cpu=3))
    assert (result.stalled, result.quiet_s) == (True, 400)
    assert "keep their CPUs busy" in result.summary


def test_before_the_first_training_step_a_longer_pause_is_allowed() -> None:
    start = {"learned": False, "longest_s": 0.0}
    assert not judge_nodes(idle_node(200, 0, 1, 2, 3, **start)).stalled
    assert judge_nodes(idle_node(310, 0, 1, 2, 3, **start)).stalled
    assert not judge_nodes(idle_node(5000, 0, 1, 2, 3, cpu=3, **start)).stalled


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [idle_node(400, 0, 1)],  # nothing is known of two ranks
        [idle_node(400, 0, 1), idle_node(400, 2, 3, time=NOW - 200)],  # a sampler that is gone
        [idle_node(400, 0, 1, seen=(0, 1, 2, 3), ranks=())],  # all have ended
    ],
)
def test_without_current_samples_of_every_rank_there_is_no_activity(nodes: list[NodeActivity]) -> None:
    assert judge_activity(nodes, 4, NOW) is None


def test_a_node_whose_ranks_have_ended_does_not_prevent_a_stall() -> None:
    left = idle_node(900, seen=(2, 3), time=NOW - 900, over=True)
    assert judge_nodes(idle_node(220, 0, 1), left).stalled
    assert judge_activity([left], 4, NOW) is None


def test_the_world_size_after_a_restart_is_used() -> None:
    assert judge_activity([idle_node(220, 0, 1)], 2, NOW) is None  # the ranks tell of four
    assert judge_nodes(idle_node(220, 0, 1, world_size=2), world_size=4).stalled
    assert judge_nodes(idle_node(220, 0, 1, world_size=None), world_size=2).stalled


def test_a_rank_that_waits_for_a_child_process_is_named() -> None:
    waits = {0: ("child", "git")}
    assert judge_nodes(idle_node(220, 0, 1, 2, 3, waits=waits)).summary == (
        "no step, output or activity of any rank for 3m40s; rank 0 waits for its child git; "
        "the longest pause before: 9s"
    )
    compiling = judge_nodes(idle_node(220, 0, 1, 2, 3, children=1, waits={0: ("child", "cc1plus")}))
    assert (compiling.stalled, compiling.summary) == (
        False, "no output for 3m40s; rank 0 waits for its child cc1plus",
    )  # fmt: skip
    usual = judge_nodes(idle_node(20, 0, 1, 2, 3, children=1, waits={0: ("child", "cc1plus")}))
    assert usual.summary == ""


def test_a_stopped_rank_is_named_before_other_ranks() -> None:
    many = dict.fromkeys(range(3), ("child", "sh"))
    result = judge_nodes(idle_node(220, 0, 1, 2, 3, waits={**many, 3: ("stopped", "")}))
    assert (
        "; rank 3 is stopped; rank 0 waits for its child sh; 2 more ranks wait in the same way;"
    ) in result.summary
    blocked = judge_nodes(
        replace(idle_node(220, 0, 1, 2, 3), waits={2: ("blocked", ""), 1: ("new kind", "")})
    )
    assert "; rank 2 is blocked in the kernel;" in blocked.summary
