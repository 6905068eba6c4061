"""A stopped or killed supervisor is distinguished from failed ranks."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.diagnose.findings import Findings, read
from dtslurm.diagnose.supervisor_events import find_killed_script, find_stopped_supervisor
from dtslurm.diagnose.verdict import judge
from dtslurm.model.runs.diagnosis import JobFacts
from dtslurm.views.events import line

STARTED = {"event": "started", "attempt": None, "nodes": "n1"}
BEGUN = {"event": "attempt", "attempt": 0}
STOPPED = {"event": "supervisor_stopped", "attempt": None, "pid": 17, "node": "n1"}
CONTINUED = {**STOPPED, "event": "supervisor_continued"}
ENDED = {"event": "ended", "attempt": 0, "exit_code": 137}
RANK_ENDED = {"event": "attempt_ended", "attempt": 0, "cause": "exit-code", "exit_code": 143}
KILLED = JobFacts(state="FAILED", over=True, signal=9, world_size=2, attempt=0)


def findings(*events: dict[str, Any], code: int = 143) -> Findings:
    records = [
        {"rank": rank, "host": "n1", "ended": 5, "exit_code": code, "signal": 15, "written": 5.0}
        for rank in range(2)
    ]
    return read({"events": list(events), "records": records, "first_failures": [[0, code]]}, [], 2)


def test_f85_a_killed_batch_script_is_the_cause() -> None:
    verdict = judge(KILLED, findings(STARTED, BEGUN), ())
    assert (verdict.cause, verdict.rank, verdict.signal) == ("killed", None, 9)
    assert verdict.summary.startswith("SIGKILL ended the batch script")
    assert "supervisor" in verdict.summary
    assert "supervisor" not in judge(KILLED, findings(STARTED), ()).summary


@pytest.mark.parametrize("events", [(STARTED, ENDED), (STARTED, BEGUN, RANK_ENDED), ()])
def test_f85_a_recorded_end_excludes_a_kill_of_the_batch_script(events: tuple[Any, ...]) -> None:
    assert "batch script" not in judge(KILLED, findings(*events), ()).summary


def test_f85_a_killed_supervisor_with_a_working_successor_is_not_the_cause() -> None:
    killed = {**STOPPED, "event": "supervisor_killed"}
    assert "did not restart it again" in find_killed_script([STARTED, BEGUN, killed, ENDED], None)
    assert find_killed_script([STARTED, BEGUN, killed, RANK_ENDED, ENDED], None) == ""
    assert find_killed_script([STARTED, BEGUN, killed, RANK_ENDED], 9) == ""
    again = {**BEGUN, "attempt": 1}
    assert "batch script" in find_killed_script([STARTED, BEGUN, RANK_ENDED, again], 9)


def test_f85_a_crashed_supervisor_is_distinguished_from_a_killed_supervisor() -> None:
    facts = JobFacts(state="FAILED", over=True, exit_code=1, world_size=2, attempt=0)
    ended = {**ENDED, "exit_code": 1}
    for code, cause, word in (
        (1, "exit-code", "crashed"),
        (137, "killed", "was killed"),
        (None, "killed", "was killed"),
    ):
        killed = {**STOPPED, "event": "supervisor_killed", "exit_code": code}
        verdict = judge(facts, findings(STARTED, BEGUN, killed, ended), ())
        assert (verdict.cause, verdict.rank) == (cause, None)
        assert f"the supervisor {word}" in verdict.summary
        assert ("batch.log" in verdict.advice) == (code == 1)
        assert f"(process 17 on n1) {word}" in line(killed).text


def test_f86_a_supervisor_counts_as_stopped_until_a_continue_or_end_event() -> None:
    assert "kill -CONT 17 on n1" in find_stopped_supervisor([STARTED, STOPPED, BEGUN])
    for later in (CONTINUED, ENDED, {**STOPPED, "event": "supervisor_killed"}):
        assert find_stopped_supervisor([STARTED, STOPPED, later]) == ""
    assert find_stopped_supervisor([CONTINUED, STOPPED]) != ""


def test_f86_the_diagnosis_of_a_running_job_mentions_a_stopped_supervisor() -> None:
    running = JobFacts(state="RUNNING", over=False, world_size=2, attempt=0)
    assert "kill -CONT 17 on n1" in judge(running, findings(STARTED, BEGUN, STOPPED, code=0), ()).summary
    assert "kill -CONT" not in judge(running, findings(STARTED, BEGUN, code=0), ()).summary


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        ({}, "; the supervisor stopped the run: 3 consecutive attempts made no progress"),
        ({"attempt": 1}, ""),
        ({"action": "restart"}, ""),
    ],
)
def test_diagnosis_of_a_run_without_progress_says_who_stopped_it(values: dict[str, Any], remark: str) -> None:
    reason = "3 consecutive attempts made no progress"
    decision = {"event": "decision", "attempt": 0, "action": "stop", "reason": reason, **values}
    facts = JobFacts(state="FAILED", over=True, exit_code=93, world_size=2, attempt=0)
    events = (STARTED, BEGUN, RANK_ENDED, decision, {**ENDED, "exit_code": 93})
    other = JobFacts(state="FAILED", over=True, exit_code=1, world_size=2, attempt=0)
    text, other_text = (judge(one, findings(*events, code=1), ()).summary for one in (facts, other))
    assert "supervisor" not in other_text
    assert text == other_text + remark
