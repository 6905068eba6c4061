"""``dtslurm diagnose`` for finished runs, array tasks, attempts and runs that never started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtslurm.model.runs.live import LiveVerdict
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe import live as live_service
from dtslurm.services.observe.live import Live
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs, ended_job, rank_record

FAILED = {
    "logs/0/rank-0.log": "first try\n",
    "logs/1/rank-0.log": "Traceback (most recent call last):\nZeroDivisionError: division by zero\n",
    "ranks/0/0.json": rank_record(0, "n1", 3),
    "ranks/1/0.json": rank_record(0, "n1", 1),
    "ranks/1/first-failure": "0 1\n",
}


def test_diagnose_examines_the_newest_attempt_by_default(invoke: Run, runs: Runs) -> None:
    runs.add("train", "7", ended_job("7", JobState.FAILED), files=FAILED)
    shown = invoke("diagnose", "train", code=0).stdout
    assert shown.startswith("job 7 (train, attempt 1): FAILED\n")
    assert "ZeroDivisionError: division by zero" in shown
    assert "--attempt 0 shows the last of them" in shown
    document = json.loads(invoke("diagnose", "--json", "--attempt", "0", "train", code=0).stdout)
    assert (document["job"], document["attempt"], document["verdict"]["exit_code"]) == ("7", 0, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attempt", "5", "train"), "job 7 has no attempt 5, only 0, 1"),
        (("--attempt", "0", "fresh"), "job 8 has no attempt 0: the run has not started"),
        (
            ("--attempt", "0", "--live", "train"),
            (
                "--live examines the running attempt, and --attempt selects an earlier one; give only "
                "one of them"
            ),
        ),
        (("--live", "train"), "7 is not running: its state is FAILED"),
        (("9_5",), "task 5 of 9 has not started"),
    ],
)
def test_diagnose_refuses_attempts_and_tasks_that_do_not_exist(
    invoke: Run, runs: Runs, words: tuple[str, ...], message: str
) -> None:
    runs.add("train", "7", ended_job("7", JobState.FAILED), files=FAILED)
    runs.add("fresh", "8", ended_job("8", JobState.CANCELLED))
    runs.add("many", "9", ended_job("9_0"), array="0-5", files={"tasks/0/logs/0/rank-0.log": "x\n"})
    assert message in invoke("diagnose", *words, code=2).stderr


def test_diagnose_describes_a_run_that_never_started(invoke: Run, runs: Runs) -> None:
    runs.add("fresh", "8", ended_job("8", JobState.CANCELLED, start_time=None, reason="CANCELLED by 0"))
    shown = invoke("diagnose", "fresh", code=0).stdout
    assert shown.startswith("job 8 (fresh): CANCELLED\n")


def test_diagnose_uses_the_batch_log_of_a_script_that_ended_before_its_first_attempt(
    invoke: Run, runs: Runs
) -> None:
    refused = "job 7 ends without work: its run belongs to job-6\n"
    runs.add("second", "7", ended_job("7", JobState.FAILED), files={"logs/batch.log": refused})
    assert refused.strip() in invoke("diagnose", "second", code=0).stdout
    submitted = json.dumps({"time": 1, "event": "submitted"}) + "\n"
    runs.add("mute", "8", ended_job("8", JobState.FAILED), files={"events.jsonl": submitted})
    assert "Slurm could not start the script" in " ".join(invoke("diagnose", "mute", code=0).stdout.split())


@pytest.mark.parametrize(("number", "who"), [("0", "root"), ("4294967294", "uid 4294967294")])
def test_diagnose_names_the_user_who_cancelled_the_job(
    invoke: Run, runs: Runs, number: str, who: str
) -> None:
    runs.add("fresh", "8", ended_job("8", JobState.CANCELLED, raw_state=f"CANCELLED by {number}"))
    assert who in invoke("diagnose", "fresh", code=0).stdout


def add_array_run(runs: Runs, *tasks: int) -> None:
    files: dict[str, Any] = {}
    for task in tasks:
        files |= {f"tasks/{task}/{place}": text for place, text in FAILED.items()}
    states = (JobState.COMPLETED, JobState.FAILED, JobState.FAILED)
    runs.add(
        "many",
        "9",
        *(ended_job(f"9_{task}", state) for task, state in enumerate(states)),
        array="0-2",
        files=files,
    )


def test_diagnose_of_an_array_selects_the_named_or_the_first_failed_task(invoke: Run, runs: Runs) -> None:
    add_array_run(runs, 0, 1, 2)
    assert invoke("diagnose", "many", code=0).stdout.startswith("job 9_1 (many, attempt 1): FAILED\n")
    assert invoke("diagnose", "9_2", code=0).stdout.startswith("job 9_2 (many, attempt 1): FAILED\n")


def test_diagnose_of_an_array_without_started_tasks_shows_the_first_task(invoke: Run, runs: Runs) -> None:
    add_array_run(runs)
    assert invoke("diagnose", "many", code=0).stdout.startswith("job 9_0 (many): COMPLETED\n")


def test_diagnose_live_prints_text_or_json(invoke: Run, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    record = runs.add("train", "7")
    verdict = LiveVerdict(cause="none", summary="It goes on.", confidence=0.9)
    live = Live(
        record=record, status=ended_job("7", JobState.RUNNING), attempt=2, task=None, verdict=verdict,
        looks=(), gpus=None, by={}, missing=("no rank has recorded its process id",),
    )  # fmt: skip
    monkeypatch.setattr(live_service, "diagnose_live", lambda *_, **__: live)
    shown = invoke("diagnose", "--live", "train", code=0).stdout
    assert shown.startswith("job 7 (train): RUNNING, live\n")
    assert "the job makes progress (90%)" in shown
    document = json.loads(invoke("diagnose", "--live", "--json", "train", code=0).stdout)
    assert (document["live"], document["attempt"], document["verdict"]["cause"]) == (True, 2, "none")
    assert document["missing"] == ["no rank has recorded its process id"]
