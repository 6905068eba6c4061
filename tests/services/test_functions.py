"""Options as Python has them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from submitit.core import utils

import dtslurm
from dtslurm.errors import RequestInvalid
from dtslurm.services import functions
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


class Echo:
    """What an executor is to send, kept in place of sending it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(functions, "submit_functions", self)

    def __call__(
        self, context: object, pickles: list[bytes], options: dict[str, Any], *_: object
    ) -> list[Any]:
        self.options = options
        self.sent = [pickle.loads(data) for data in pickles]
        return []


@pytest.mark.parametrize(
    ("time", "minutes", "lead"),
    [(3, 3, 90), ("2:00:00", 120, 90), ("3h", 180, 90), ("2", 2, 60), ("1:30", 2, 45), (None, 5, 90)],
)
def test_the_time_limit_of_a_function_is_read_as_the_option_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: object, minutes: int, lead: int
) -> None:
    seen = Echo(monkeypatch)
    made = dtslurm.Executor(tmp_path, profile="local")
    made.update_parameters(**({} if time is None else {"time": time}))
    made._internal_process_submissions([utils.DelayedSubmission(print)])
    assert seen.sent[0]._timeout_min == minutes
    assert seen.options["signal_before"] == lead


def test_a_time_limit_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Echo(monkeypatch)
    made = dtslurm.Executor(tmp_path, profile="local")
    made.update_parameters(time="soon")
    with pytest.raises(RequestInvalid, match="time: 'soon' is not a duration"):
        made._internal_process_submissions([utils.DelayedSubmission(print)])


@pytest.mark.parametrize(("asked", "tasks"), [({}, 1), ({"tasks_per_node": 4}, 4)])
def test_a_function_is_one_task_on_a_node_unless_more_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], tasks: int
) -> None:
    seen = Echo(monkeypatch)
    made = dtslurm.Executor(tmp_path, profile="local")
    made.update_parameters(gpus_per_node=8, **asked)
    made._internal_process_submissions([utils.DelayedSubmission(print)])
    assert seen.options["ntasks_per_node"] == tasks
