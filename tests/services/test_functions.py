"""Options and time limits of the Python interface."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from submitit.core import utils

import dtslurm
from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.submit import functions
from dtslurm.services.submit.functions import request_of


def test_python_options_are_converted_to_a_request() -> None:
    request = request_of(
        {
            "nodes": "2",
            "time": 5,
            "mem": None,
            "env": {"A": 1, "B": None},
            "setup": "module load x",
            "sample": False,
        }
    )
    assert (request.nodes, request.time, request.mem, request.sample) == (2, "5", None, False)
    assert (request.env, request.setup) == (("A=1", "B"), ("module load x",))


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"nodse": 2}, ["unknown option 'nodse'; did you mean 'nodes'?"]),
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
def test_python_options_of_a_wrong_type_are_reported_together(
    options: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(RequestInvalid) as caught:
        request_of(options)
    assert list(caught.value.problems) == problems


def test_dir_of_the_package_lists_the_public_names() -> None:
    assert {"submit", "Job", "Cluster", "Executor"} <= set(dir(dtslurm))


class Echo:
    """What an executor is to send, kept in place of sending it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(functions, "submit_functions", self)

    def __call__(
        self, context: object, pickles: list[bytes], options: dict[str, Any], *_: object, **__: object
    ) -> list[Any]:
        self.options = options
        self.sent = [pickle.loads(data) for data in pickles]
        return []


@pytest.mark.parametrize(
    ("time", "minutes", "lead"),
    [
        (3, 3, 90),
        ("2:00:00", 120, 90),
        ("3h", 180, 90),
        ("2", 2, 60),
        ("1:30", 2, 45),
        (0.01, 1, 1),
        (None, 5, 90),
    ],
)
def test_the_executor_parses_time_limits_like_the_time_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: object, minutes: int, lead: int
) -> None:
    seen = Echo(monkeypatch)
    executor = dtslurm.Executor(tmp_path, profile="local")
    executor.update_parameters(**({} if time is None else {"time": time}))
    executor._internal_process_submissions([utils.DelayedSubmission(print)])
    assert seen.sent[0]._timeout_min == minutes
    assert seen.options["signal_before"] == lead


def test_an_invalid_time_limit_of_a_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Echo(monkeypatch)
    executor = dtslurm.Executor(tmp_path, profile="local")
    executor.update_parameters(time="soon")
    with pytest.raises(RequestInvalid, match="time: 'soon' is not a duration"):
        executor._internal_process_submissions([utils.DelayedSubmission(print)])


@pytest.mark.parametrize(("options", "tasks"), [({}, 1), ({"tasks_per_node": 4}, 4)])
def test_a_function_runs_as_one_task_per_node_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], tasks: int
) -> None:
    seen = Echo(monkeypatch)
    executor = dtslurm.Executor(tmp_path, profile="local")
    executor.update_parameters(gpus_per_node=8, **options)
    executor._internal_process_submissions([utils.DelayedSubmission(print)])
    assert seen.options["ntasks_per_node"] == tasks


def test_job_logs_refuses_invalid_ranks_and_patterns(tmp_path: Path) -> None:
    record = JobRecord(
        token="a", cluster="local", name="x", run_dir=str(tmp_path), phase="submitted", created_at=1
    )
    job = dtslurm.Job(record)
    for ranks in ("x", [0.5], [-1]):
        with pytest.raises(RequestInvalid, match="ranks should be a list of ranks"):
            job.logs(ranks=ranks)  # type: ignore[arg-type]
    with pytest.raises(RequestInvalid, match=r"grep '\[' is not a regular expression"):
        job.logs(grep="[")


def test_a_job_can_be_looked_up_by_its_integer_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(JobNotFound):
        dtslurm.Job.find(98765, "local")
    with pytest.raises(JobNotFound):
        dtslurm.Cluster("local").job(98765)


@pytest.mark.parametrize("lacking", ["submitit", "cloudpickle"])
def test_the_executor_names_the_missing_package_and_the_extra(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.delitem(sys.modules, "dtslurm.executor", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == lacking]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(lacking), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"needs {lacking}: pip install 'dtslurm\[submitit\]'"):
        dtslurm.Executor  # noqa: B018 - looking is what imports it


class Absent:
    """Makes a package one that is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


def test_submit_refuses_a_job_file_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    with pytest.raises(RequestInvalid, match="is a job file: submit it with dtslurm submit"):
        dtslurm.submit("job.yaml", cluster="local")


def test_output_of_a_rank_without_an_end_is_waited_for_only_while_its_run_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(functions, "LAST_OUTPUT_S", 3600.0)

    def remove_the_run(seconds: float) -> None:
        pauses.append(seconds)
        (tmp_path / "logs" / "0").rmdir()

    monkeypatch.setattr(time, "sleep", remove_the_run)
    (tmp_path / "logs" / "0").mkdir(parents=True)
    record = JobRecord(
        token="a", cluster="local", name="x", run_dir=str(tmp_path), phase="submitted", created_at=1
    )
    functions.wait_for_rank_end(record, "", 0)
    assert len(pauses) == 1
