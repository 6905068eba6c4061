"""The events of a run as text."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.views.events import drop_outdated_staging, line, lines

SAID: list[tuple[dict[str, Any], str, bool]] = [
    (
        {"event": "not_distributed", "world_size": 4, "evidence": "no connection leads from rank 1"},
        "NOT DISTRIBUTED: the 4 ranks do not train together: no connection leads from rank 1",
        True,
    ),
    (
        {"event": "ranks_apart", "evidence": "no connection leads from rank 1"},
        "no connection leads from rank 1; this is intended if each rank works on its own part",
        False,
    ),
    (
        {"event": "distributed", "evidence": "connections lead from rank 1"},
        "the ranks train together: connections lead from rank 1",
        False,
    ),
    ({"event": "started", "job_id": "7", "nodes": "n[1-2]"}, "job 7 started on n[1-2]", False),
    (
        {"event": "attempt", "attempt": 1, "nodes": "n1", "world_size": 8},
        "attempt 1 starts on n1, 8 ranks",
        False,
    ),
    (
        {"event": "attempt", "attempt": 0, "nodes": "n1", "world_size": 1},
        "attempt 0 starts on n1, 1 rank",
        False,
    ),
    (
        {
            "event": "attempt_ended",
            "attempt": 1,
            "exit_code": 1,
            "rank": 3,
            "node": "n2",
            "summary": "no memory",
        },
        "attempt 1 ended with exit code 1: rank 3 on n2: no memory",
        True,
    ),
    (
        {"event": "attempt_ended", "attempt": 2, "exit_code": None, "cause": "lost"},
        "attempt 2 was lost",
        True,
    ),
    ({"event": "attempt_ended", "attempt": 2, "exit_code": 85}, "attempt 2 ended with exit code 85", False),
    (
        {
            "event": "decision",
            "action": "restart",
            "reason": "the node is bad",
            "excluded": ["n2"],
            "wait_s": 30.0,
        },
        "restarts in 30s without n2: the node is bad",
        False,
    ),
    (
        {
            "event": "decision",
            "action": "stop",
            "reason": "it failed three times",
            "excluded": [],
            "wait_s": 0,
        },
        "stops: it failed three times",
        False,
    ),
    (
        {
            "event": "decision",
            "action": "restart",
            "reason": "it may not happen again",
            "counted": True,
            "budget": "crashes",
            "used": 2,
            "of": 3,
        },
        "restarts: it may not happen again (restart 2 of 3 after crashes)",
        False,
    ),
    (
        {
            "event": "decision",
            "action": "stop",
            "reason": "all 3 restarts after crashes are used up",
            "counted": False,
            "budget": "crashes",
            "used": 3,
            "of": 3,
        },
        "stops: all 3 restarts after crashes are used up",
        False,
    ),
    ({"event": "onward", "by": "requeue", "done": True, "words": ""}, "the job is requeued", False),
    (
        {"event": "onward", "by": "requeue", "done": False, "words": "no"},
        "the job could not be requeued: no",
        True,
    ),
    (
        {"event": "hang", "ranks": [0, 1], "rank": 1, "node": "n2", "summary": "waits for data"},
        "hang detected, rank 1 on n2: waits for data",
        True,
    ),
    ({"event": "hang", "ranks": list(range(64)), "rank": None}, "hang detected, 64 ranks", True),
    ({"event": "node_excluded", "node": "n2", "reason": "ECC"}, "node n2 excluded: ECC", True),
    ({"event": "agent_restarted", "node": "n2"}, "the node agent on n2 restarted; its ranks continue", False),
    (
        {
            "event": "health",
            "node": "n2",
            "ok": False,
            "findings": [{"check": "gpu", "level": "bad", "evidence": "7 of 8"}],
        },
        "health: n2 is bad (gpu: 7 of 8)",
        True,
    ),
    (
        {
            "event": "health",
            "node": "n3",
            "ok": True,
            "findings": [{"check": "disk", "evidence": "92 % full"}],
        },
        "health: n3 is usable (disk: 92 % full)",
        False,
    ),
    (
        {
            "event": "staging",
            "node": "n1",
            "source": "data/",
            "bytes": 3 << 30,
            "total": 12 << 30,
            "done": False,
        },
        "copying data/ to n1: 3.0G of 12G (25%)",
        False,
    ),
    ({"event": "staging_failed", "problems": ["no room"]}, "the data could not be staged: no room", True),
    (
        {"event": "checkpoint_failed", "step": 5, "problem": "disk full"},
        "the checkpoint of step 5 was not written: disk full",
        True,
    ),
    (
        {"event": "staged", "seconds": 90.2, "bytes": 3 << 30, "left": None},
        "staging finished, 3.0G copied in 1m30s",
        False,
    ),
    ({"event": "something new", "x": 1}, "something new", False),
]


@pytest.mark.parametrize(("event", "text", "bad"), SAID)
def test_an_event_is_described_in_text(event: dict[str, Any], text: str, bad: bool) -> None:
    result = line({"time": 5, **event})
    assert (result.time, result.text, result.bad) == (5.0, text, bad)


def staging_event(node: str, done: bool, size: int = 1 << 30, **values: Any) -> dict[str, Any]:
    known = {
        "event": "staging",
        "node": node,
        "source": "imagenet",
        "bytes": size,
        "total": 2 << 30,
        "done": done,
    }
    return {**known, **values}


def test_staging_events_of_several_nodes_are_merged_into_one_line() -> None:
    begun = {"event": "started", "job_id": "7", "nodes": "n[1-2]", "time": 1}
    result = [
        begun,
        *(
            staging_event(f"n{node}", False, size=step << 20, time=2 + step)
            for step in range(50)
            for node in (1, 2)
        ),
    ]
    result.append(staging_event("n1", True, size=2 << 30, time=99))
    assert len(drop_outdated_staging(result)) == 3
    first, second = lines(result)
    assert first.text == "job 7 started on n[1-2]"
    assert (second.time, second.text) == (
        99,
        "copying imagenet to 2 nodes: 2.0G of 4.0G (51%), 1 of 2 nodes have finished",
    )
    result.append(staging_event("n2", True, size=2 << 30))
    assert lines(result)[1].text == "data imagenet is on 2 nodes: 4.0G"


def test_the_staging_line_counts_nodes_without_events() -> None:
    result = [staging_event(f"n{node}", True, size=2 << 30, nodes=4) for node in (1, 2, 3)]
    assert lines(result)[0].text == (
        "copying imagenet to 4 nodes: 6.0G of 8.0G (75%), 3 of 4 nodes have finished"
    )
    result.append(staging_event("n4", True, size=2 << 30, nodes=4))
    assert lines(result)[0].text == "data imagenet is on 4 nodes: 8.0G"


def test_consecutive_healthy_nodes_are_merged_into_one_line() -> None:
    fine = [{"event": "health", "node": f"n{node}", "ok": True, "findings": []} for node in range(64)]
    bad = {"event": "health", "node": "n9", "ok": False, "findings": []}
    again = {"event": "attempt", "attempt": 1, "nodes": "n[0-63]"}
    texts = [item.text for item in lines([*fine, bad, again, fine[0]])]
    assert texts == [
        "health: 64 nodes are healthy",
        "health: n9 is bad",
        "attempt 1 starts on n[0-63]",
        "health: n0 is healthy",
    ]
