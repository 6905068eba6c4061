"""Differences between runs."""

from __future__ import annotations

from dtslurm.services.observe.compare import Difference, differences

ONE = {
    "request": {"time": "10", "script": "train.py", "args": ["--lr", "1e-3"], "env": [["A", "1"]]},
    "layout": {"nodes": 1, "ranks_per_node": 2},
    "spec": {"python": "/a/bin/python", "work_dir": "/one", "launcher": "srun"},
    "git": {"commit": "abc", "branch": "main", "dirty": False},
}
TWO = {
    "request": {
        "time": "10",
        "script": "train.py",
        "args": ["--lr", "3e-4"],
        "env": [["A", "1"], ["B", "2"]],
    },
    "layout": {"nodes": 2, "ranks_per_node": 2},
    "spec": {"python": "/b/bin/python", "work_dir": "/two", "launcher": "srun"},
    "git": None,
}


def test_compare_lists_differences_by_section() -> None:
    result = list(differences([ONE, TWO], [b"", b"+1\n-2\n"]))
    assert result == [
        Difference("configuration", "args", ("--lr 1e-3", "--lr 3e-4")),
        Difference("configuration", "env", ("A=1", "A=1 B=2")),
        Difference("layout", "nodes", ("1", "2")),
        Difference("environment", "python", ("/a/bin/python", "/b/bin/python")),
        Difference("code", "commit", ("abc", "-")),
        Difference("code", "branch", ("main", "-")),
        Difference("code", "dirty", ("no", "-")),
        Difference("code", "uncommitted changes (code.diff)", ("-", "2 lines")),
    ]


def test_compare_of_equal_runs_lists_no_difference() -> None:
    assert list(differences([ONE, dict(ONE)], [b"x", b"x"])) == []
