"""The activity of running jobs, read from the files of samplers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import NodeActivity
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.runs.status import RunView
from dtslurm.views.telemetry import activity_of, node_activity, read

NOW = 1_800_000_000.0
KINDS = ("output", "cpu", "children", "io", "gpu")


def activity_sample(quiet: float = 220, **values: Any) -> dict[str, Any]:
    """Return a sample of two ranks that were idle for ``quiet`` seconds."""
    known = {"schema": 1, "time": NOW - 2, "ranks": [0, 1], "seen": [0, 1], "learned": True, "longest": 5.0}
    return {**known, **dict.fromkeys(KINDS, NOW - quiet), "waits": {}, **values}


def write_activity(folder: Path, text: object, attempt: int = 0, node: int = 0) -> None:
    path = folder / "metrics" / str(attempt) / f"activity-{node}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "logs" / str(attempt)).mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))


def run_view(folder: Path, *statuses: JobStatus, **values: Any) -> RunView:
    record = JobRecord(
        **{
            "token": "t", "cluster": "hpc", "name": "llama", "run_dir": str(folder), "job_id": "17",
            "phase": "submitted", "created_at": 0, "world_size": 2, **values,
        }
    )  # fmt: skip
    return RunView(record, statuses or (JobStatus(job_id="17", state=JobState.RUNNING),))


def state_words(view: RunView) -> str:
    [seen] = add_activity([view], NOW)
    return seen.words_of(seen.statuses)


def test_a_running_job_with_idle_ranks_is_shown_as_stalled(tmp_path: Path) -> None:
    assert state_words(run_view(tmp_path)) == "RUNNING"
    write_activity(tmp_path, activity_sample())
    assert state_words(run_view(tmp_path)) == "STALLED 3m40s"
    write_activity(tmp_path, activity_sample(3))
    assert state_words(run_view(tmp_path)) == "RUNNING"


@pytest.mark.parametrize("values", [{"holds_allocation": True}, {"script": "/runs/a/dtslurm_session.py"}])
def test_a_job_that_may_do_nothing_is_never_stalled(tmp_path: Path, values: dict[str, Any]) -> None:
    write_activity(tmp_path, activity_sample())
    assert state_words(run_view(tmp_path)) == "STALLED 3m40s"
    assert state_words(run_view(tmp_path, **values)) == "RUNNING"


@pytest.mark.parametrize(
    "status",
    [
        JobStatus(job_id="17", state=JobState.PENDING),
        JobStatus(job_id="17", state=JobState.SUSPENDED),
        JobStatus(job_id="17", state=JobState.COMPLETED, flags=frozenset({StateFlag.COMPLETING})),
        JobStatus(job_id="17", state=JobState.RUNNING, flags=frozenset({StateFlag.CONFIGURING})),
        JobStatus(job_id="17", state=JobState.FAILED),
    ],
)
def test_an_idle_job_in_another_state_keeps_its_state(tmp_path: Path, status: JobStatus) -> None:
    write_activity(tmp_path, activity_sample())
    assert state_words(run_view(tmp_path, status)) == status.word


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": "now", "ranks": 3, "waits": {"x": 1}}', "null"])
def test_a_malformed_activity_file_does_not_change_the_state(tmp_path: Path, text: str) -> None:
    write_activity(tmp_path, text)
    assert state_words(run_view(tmp_path)) == "RUNNING"


def test_only_the_newest_attempt_decides_whether_a_job_is_stalled(tmp_path: Path) -> None:
    write_activity(tmp_path, activity_sample())
    write_activity(tmp_path, activity_sample(3), attempt=1)
    assert state_words(run_view(tmp_path)) == "RUNNING"


def test_a_job_is_stalled_only_if_the_ranks_of_all_nodes_are_idle(tmp_path: Path) -> None:
    write_activity(tmp_path, activity_sample(ranks=[0], seen=[0]))
    assert state_words(run_view(tmp_path)) == "RUNNING"
    write_activity(tmp_path, activity_sample(ranks=[1], seen=[1]), node=1)
    assert state_words(run_view(tmp_path)) == "STALLED 3m40s"


@pytest.mark.parametrize("ahead", [100, -100])
def test_f66_a_wrong_clock_on_a_node_does_not_change_the_stall_duration(tmp_path: Path, ahead: int) -> None:
    values = activity_sample()
    moved = {key: item + ahead for key, item in values.items() if key in ("time", *KINDS)}
    write_activity(tmp_path, {**values, **moved})
    os.utime(tmp_path / "metrics/0/activity-0.json", (values["time"], values["time"]))
    assert state_words(run_view(tmp_path)) == "STALLED 3m40s"


def test_activity_is_read_from_the_local_copy_of_a_remote_run(tmp_path: Path) -> None:
    write_activity(tmp_path / "copy", activity_sample())
    assert state_words(run_view(Path("/far/run"), mirror=str(tmp_path / "copy"))) == "STALLED 3m40s"


def test_a_run_of_an_unreachable_queue_keeps_its_state(tmp_path: Path) -> None:
    write_activity(tmp_path, activity_sample())
    silent = RunView(run_view(tmp_path).record, run_view(tmp_path).statuses, trouble="no answer")
    assert state_words(silent) == "RUNNING"


def test_each_array_task_has_its_own_activity(tmp_path: Path) -> None:
    for task, quiet in (("1", 220), ("2", 3), ("3", 400)):
        write_activity(tmp_path / "tasks" / task, activity_sample(quiet))
    tasks = [JobStatus(job_id=f"17_{task}", state=JobState.RUNNING) for task in "123"]
    [seen] = add_activity([run_view(tmp_path, *tasks, array="1-3")], NOW)
    assert [seen.word_of(task) for task in tasks] == ["STALLED", "RUNNING", "STALLED"]
    assert seen.words_of([tasks[0], tasks[2]]) == "STALLED 6m40s"


def test_node_activity_ignores_malformed_values_and_control_characters() -> None:
    read_back = node_activity(
        activity_sample(waits={"0": ["child", "cc1plus\x1b[2J"], "1": ["stopped", ""], "x": [], "2": 7})
    )
    assert read_back.waits == {0: ("child", "cc1plus"), 1: ("stopped", "")}
    assert node_activity({"ranks": [0, "1", None]}) == NodeActivity(time=0.0, ranks=(0,))


def test_activity_of_reads_the_activity_in_a_telemetry_answer() -> None:
    answer = {
        "now": NOW,
        "attempt": 1,
        "attempts": [0, 1],
        "world_size": 2,
        "activity": [activity_sample(), 7],
    }
    activity = activity_of(read(answer), 2)
    assert activity is not None
    assert (activity.stalled, activity.quiet_s) == (True, 220)
    assert activity_of(read({**answer, "attempt": 0}), 2) is None
    assert activity_of(read({"now": NOW}), 2) is None
