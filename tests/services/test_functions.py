"""Options as Python has them."""

from __future__ import annotations

from typing import Any

import pytest

import dtslurm
from dtslurm.errors import RequestInvalid
from dtslurm.services.functions import request_of


def test_options_become_what_the_command_line_gives() -> None:
    found = request_of(
        {
            "nodes": "2",
            "time": 5,
            "mem": None,
            "env": {"A": 1, "B": None},
            "setup": "module load x",
            "sample": False,
        }
    )
    assert (found.nodes, found.time, found.mem, found.sample) == (2, "5", None, False)
    assert (found.env, found.setup) == (("A=1", "B"), ("module load x",))


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"nodse": 2}, ["there is no option 'nodse'; did you mean 'nodes'?"]),
        ({"nodes": "two"}, ["nodes should be a whole number, not 'two'"]),
        ({"nodes": 1.5}, ["nodes should be a whole number, not 1.5"]),
        ({"snapshot": "no"}, ["snapshot should be True or False, not 'no'"]),
        ({"env": 7}, ["env should be a text or a list of them, not 7"]),
        (
            {"nodes": [], "sample": 2},
            ["nodes should be a whole number, not []", "sample should be True or False, not 2"],
        ),
    ],
)
def test_values_of_the_wrong_kind_are_told_at_once(options: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(RequestInvalid) as caught:
        request_of(options)
    assert list(caught.value.problems) == problems


def test_a_shell_completes_what_there_is() -> None:
    assert {"submit", "Job", "Cluster", "Executor"} <= set(dir(dtslurm))
