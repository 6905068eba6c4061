"""``dtslurm cluster nodes``: the bad-node list on the command line."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run


def bad_node_names(run: Run) -> list[str]:
    return [
        node["node"]
        for node in json.loads(run("cluster", "nodes", "--cluster", "a100x8-ib", "--json").stdout)["nodes"]
    ]


def test_cluster_nodes_adds_lists_and_removes_nodes(run: Run) -> None:
    where = ("--cluster", "a100x8-ib")
    assert "the bad-node list of a100x8-ib is empty" in run("cluster", "nodes", *where).stderr
    added = run(
        "cluster", "nodes", "add", "n[3-4]", "n7", "--reason", "slow\x1b[2J disk", "--expires", "2d", *where
    )
    assert added.stderr == "n[3-4,7] of a100x8-ib: excluded for 2d00h\n"
    assert bad_node_names(run) == ["n3", "n4", "n7"]
    table = run("cluster", "nodes", *where).stdout.splitlines()
    assert table[0].split() == ["NODE", "WHY", "JOB", "BY", "SEEN", "HOLDS"]
    assert "slow" in table[1]
    assert "\x1b" not in table[1]
    removed = run("cluster", "nodes", *where, "remove", "n[3-5]")
    assert "n5 is not on the bad-node list of a100x8-ib" in removed.stderr
    assert bad_node_names(run) == ["n7"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "n7"), "--reason"),
        (("add", "n7;x", "--reason", "slow"), "is not a node name"),
        (("add", "n[1-", "--reason", "slow"), "is not a node name"),
        (("add", "n7", "--reason", "slow", "--expires", "soon"), "--expires: 'soon' is not a duration"),
        (("remove",), "NODE"),
    ],
)
def test_cluster_nodes_refuses_invalid_arguments(run: Run, words: tuple[str, ...], said: str) -> None:
    done = run("cluster", "nodes", *words, "--cluster", "a100x8-ib", code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert bad_node_names(run) == []
