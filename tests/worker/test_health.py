"""Decisions after the health check: train, exclude nodes, requeue or stop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.preflight.findings import finding
from dtslurm.worker.supervisor import health
from dtslurm.worker.supervisor.health import HealthReport, Report, decide, judge_nodes


def report(node: str, *bad: str) -> Report:
    return Report(node, not bad, [finding(check, "bad", f"{check} is broken") for check in bad])


def choice(reports: list[Report], before: tuple[Report, ...] = (), **more: Any) -> tuple[str, list[str]]:
    values: dict[str, Any] = {"requeues": 0, "node_count": 2, "may_requeue": True, **more}
    decision = decide(reports, before, **values)
    assert decision.reason
    return decision.action, list(decision.exclude)


def test_health_decision_excludes_bad_nodes_when_enough_nodes_are_healthy() -> None:
    assert choice([report("n1"), report("n2")]) == ("go", [])
    assert choice([report("n1"), report("n2", "gpus"), report("n3")]) == ("go", ["n2"])
    assert choice([report("n1", "hca"), report("n2", "gpus"), report("n3")], node_count=1) == (
        "go",
        ["n1", "n2"],
    )


def test_health_decision_requeues_the_job_without_bad_nodes_when_too_few_are_healthy() -> None:
    assert choice([report("n1"), report("n2", "gpus")]) == ("requeue", ["n2"])
    assert choice([report("n1", "gpus")], node_count=1) == ("requeue", ["n1"])


@pytest.mark.parametrize(
    ("reports", "before", "more", "words"),
    [
        (
            [report("n1", "hca"), report("n2", "hca", "shm")],
            (),
            {},
            "the nodes are not the cause: hca: hca is broken",
        ),
        ([report("n2", "hca")], (report("n1", "hca"),), {"node_count": 1}, "the nodes are not the cause"),
        (
            [report("n1"), report("n2", "gpus")],
            (report("n2", "gpus"), report("n1")),
            {},
            "n2 failed the checks before",
        ),
        ([report("n1"), report("n2", "gpus")], (), {"requeues": 3}, "3 times"),
        ([report("n1"), report("n2", "gpus")], (), {"may_requeue": False}, "no other node"),
    ],
)
def test_health_decision_stop_states_the_reason(
    reports: list[Report], before: tuple[Report, ...], more: dict[str, Any], words: str
) -> None:
    decision = decide(reports, before, **{"requeues": 0, "node_count": 2, "may_requeue": True, **more})
    assert decision.action == "stop"
    assert words in decision.reason


def test_health_decision_requeues_when_nodes_fail_different_checks() -> None:
    assert choice([report("n1", "hca"), report("n2", "shm")]) == ("requeue", ["n1", "n2"])


def test_health_decision_stops_for_a_missing_python_module() -> None:
    gone = finding("framework", "bad", "import of torch fails: ModuleNotFoundError: No module named 'torch'")
    assert choice([Report("n1", False, [gone])], node_count=1) == ("stop", [])


def test_node_without_an_end_line_is_bad_unless_no_node_has_an_answer() -> None:
    fine = [finding("disk", "ok", "yes")]
    reports = judge_nodes(["n1", "n2", "n3"], HealthReport({"n1": fine, "n2": fine}, ["n1"], [], [True]))
    assert [item.ok for item in reports] == [True, False, False]
    assert reports[2].why() == "answer: did not answer"
    assert (
        judge_nodes(["n1", "n2"], HealthReport({}, [], ["srun: error: Unable to create step"], [True])) == []
    )


def test_node_named_in_an_srun_launch_error_is_bad() -> None:
    words = ["srun: error: Task launch for StepId=17.0 failed on node n2: Communication connection failure"]
    reports = judge_nodes(["n1", "n2", "n3"], HealthReport({"n1": []}, [], words, []))
    assert [item.ok for item in reports] == [True, False, True]
    assert "Communication connection failure" in reports[1].why()
    assert [item.ok for item in judge_nodes(["n2"], HealthReport({}, [], words, []))] == [False]


def test_unknown_and_warning_findings_leave_a_node_healthy() -> None:
    answer = [finding("gpus", "unknown", "?"), finding("clock", "warn", "9 s")]
    [result] = judge_nodes(["n1"], HealthReport({"n1": answer}, ["n1"], [], []))
    assert result.ok


def test_reports_of_earlier_starts_are_read_from_the_events() -> None:
    fault = {"check": "gpus", "level": "bad", "evidence": "7 of 8"}
    events: list[dict[str, Any]] = [
        {"event": "health", "node": "n1", "ok": False, "findings": [fault, "junk"]},
        {"event": "health", "node": "n2"},
    ]
    assert health.of_events(events) == [Report("n1", False, [fault])]


def test_health_check_ends_a_hanging_srun(tmp_path: Path) -> None:
    mark = tmp_path / "told"
    words = 'dtslurm-health: {"node": "n1", "begin": true}'
    hang = f"print({words!r}, flush=True); import time; open({str(mark)!r}, 'w'); time.sleep(600)"
    result = health.look([sys.executable, "-c", hang], limit_s=120.0, has_ended=mark.exists)
    assert (result.findings, result.done, result.late) == ({"n1": []}, [], [True])
    assert health.look([sys.executable, "-c", "import time; time.sleep(600)"], limit_s=0.0).done == []
    assert health.look(["/no/such/srun"]).words
