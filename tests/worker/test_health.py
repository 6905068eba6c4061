"""Decisions after the health check: train, exclude nodes, requeue or stop."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.preflight import network
from dtslurm.worker.preflight.findings import finding
from dtslurm.worker.supervisor import health
from dtslurm.worker.supervisor.health import HealthReport, Report, are_enough, decide, judge_nodes
from dtslurm.worker.supervisor.restart_policy import Decision


def report(node: str, *bad: str) -> Report:
    return Report(node, not bad, [finding(check, "bad", f"{check} is broken") for check in bad])


def decide_for(
    reports: list[Report], before: tuple[Report, ...] = (), *, node_count: int = 2, **more: Any
) -> Decision:
    """Return the decision for a job of one component that needs ``node_count`` of its nodes."""
    suffices = are_enough(reports, [[item.node for item in reports]], [node_count])
    return decide(reports, before, **{"requeues": 0, "may_requeue": True, "are_enough": suffices, **more})


def choice(reports: list[Report], before: tuple[Report, ...] = (), **more: Any) -> tuple[str, list[str]]:
    decision = decide_for(reports, before, **more)
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
    decision = decide_for(reports, before, **more)
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


# ---- Words and limits ----


@pytest.mark.parametrize(
    ("reports", "more", "reason"),
    [
        ([report("n1"), report("n2")], {}, "all nodes passed the checks"),
        ([report("n1")], {}, "all nodes passed the checks"),  # fewer than needed, but none is bad
        ([report("n1", "a"), report("n2", "b"), report("n3")], {"node_count": 1}, "n1, n2 are excluded"),
        ([report("n1", "a"), report("n2", "b")], {}, "no node is left to replace n1, n2"),
        ([report("n1"), report("n2", "a")], {"requeues": 2}, "no node is left to replace n2"),
        (
            [report("n1"), report("n2", "a")],
            {"requeues": 4},
            "bad nodes were excluded 4 times, and other nodes are bad too",
        ),
        (
            [report("n1", "a", "b"), report("n2", "c", "b")],
            {},
            "every node failed the same check, so the nodes are not the cause: b: b is broken",
        ),
    ],
)
def test_health_decision_states_its_reason(reports: list[Report], more: dict[str, Any], reason: str) -> None:
    decision = decide_for(reports, **more)
    assert decision.reason == reason


@pytest.mark.parametrize(
    ("check", "evidence", "action"),
    [
        ("framework", "No module named 'torch'", "stop"),
        ("framework", "libcuda.so is missing", "requeue"),
        ("gpus", "No module named 'torch'", "requeue"),
        ("a check", "No module named 'torch'", "requeue"),
    ],
)
def test_fault_of_a_single_node_is_common_only_if_a_python_module_is_missing(
    check: str, evidence: str, action: str
) -> None:
    single = Report("n1", False, [finding(check, "bad", evidence)])
    assert choice([single], node_count=1)[0] == action
    assert choice([single], (single,), node_count=1)[0] == "stop"


def test_node_that_was_healthy_before_is_replaced() -> None:
    assert choice([report("n1"), report("n2", "a")], (report("n2"), report("n1", "b"))) == ("requeue", ["n2"])
    reports, earlier = [report("n3", "a"), report("n2", "b")], [report("n2", "c"), report("n3", "d")]
    decision = decide(reports, earlier, 0, True, are_enough=False)
    assert decision.reason == "n2, n3 failed the checks before, and Slurm allocated them again"
    assert decision.exclude == ["n3", "n2"]


def test_report_names_only_bad_findings() -> None:
    findings = [
        finding("gpus", "bad", "7 of 8"),
        finding("clock", "warn", "9 s"),
        finding("disk", "bad", "full"),
        finding("hca", "a level that sorts first", "?"),
    ]
    result = Report("n1", False, findings)
    assert result.faults() == [findings[0], findings[2]]
    assert result.why() == "gpus: 7 of 8; disk: full"


@pytest.mark.parametrize(
    ("findings", "done", "words", "is_late", "levels"),
    [
        ({"n1": []}, ["n1"], [], False, []),
        ({"n1": []}, [], [], False, ["unknown"]),
        ({"n1": []}, [], [], True, ["bad"]),
        ({"n1": [finding("gpus", "warn", "?")]}, [], [], True, ["warn", "bad"]),
        ({"n1": []}, ["n1"], ["srun: error: Node failure on n1"], False, ["bad"]),
        ({}, [], ["srun: error: Node failure on n1"], False, ["bad"]),
        ({}, [], ["srun: error: Node failure on n2"], False, None),
        ({"n2": []}, [], ["srun: error: Node failure on n2"], False, ["unknown"]),
    ],
)
def test_node_without_a_complete_answer_is_bad_if_its_time_was_up_or_srun_names_it(
    findings: dict[str, Any], done: list[str], words: list[str], is_late: bool, levels: list[str] | None
) -> None:
    reports = judge_nodes(["n1"], HealthReport(findings, done, words, [True] if is_late else []))
    if levels is None:
        assert reports == []
        return
    [result] = reports
    assert (result.node, [entry["level"] for entry in result.findings]) == ("n1", levels)
    assert result.ok is ("bad" not in levels)


@pytest.mark.parametrize(
    ("text", "findings", "done", "words"),
    [
        (b"srun: job 17 queued\n", {}, [], ["srun: job 17 queued"]),
        (b"\xff" + b"x" * 300, {}, [], ["\ufffd" + "x" * 199]),
        (b'dtslurm-health: {"node": 7}', {}, [], ['dtslurm-health: {"node": 7}']),
        (b'dtslurm-health: {"node": "n1", "begin": true}', {"n1": []}, [], []),
        (b'dtslurm-health: {"node": "n1", "end": true}', {"n1": []}, ["n1"], []),
        (
            b'dtslurm-health: {"node": "n1", "check": "gpus", "level": "bad"}',
            {"n1": [finding("gpus", "bad", "")]},
            [],
            [],
        ),
    ],
)
def test_line_of_the_preflight_step_is_a_finding_or_a_word_of_srun(
    text: bytes, findings: dict[str, Any], done: list[str], words: list[str]
) -> None:
    result = HealthReport({}, [], [], [])
    health._parse_line(text, result)
    assert result == HealthReport(findings, done, words, [])


@pytest.mark.parametrize(
    ("skew", "level", "evidence"),
    [
        (None, "ok", "as before"),
        (3.0, "ok", "3 s ahead of the controller's"),
        (3.2, "warn", "3 s ahead of the controller's"),
        (-9.0, "warn", "9 s behind the controller's"),
        (-3.0, "ok", "3 s behind the controller's"),
        (0.0, "ok", "0 s behind the controller's"),
    ],
)
def test_clock_of_the_first_node_is_compared_with_the_controllers(
    skew: float | None, level: str, evidence: str
) -> None:
    before = [finding("clock", "ok", "as before"), finding("disk", "ok", "free"), finding("a", "ok", "")]
    result = health._with_clock(Report("n1", True, before), skew)
    findings = {entry["check"]: (entry["level"], entry["evidence"]) for entry in result.findings}
    assert findings == {"clock": (level, evidence), "disk": ("ok", "free"), "a": ("ok", "")}
    assert len(result.findings) == 3


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "n1"),
        ({"host_suffix": "-ib"}, "n1-ib"),
        ({"head": "10.0.0.1", "host_suffix": "-ib"}, "10.0.0.1"),
    ],
)
def test_first_node_is_reached_under_the_name_of_the_profile(
    tmp_path: Path, values: dict[str, str], name: str
) -> None:
    (tmp_path / "health.json").write_text(json.dumps(values))
    assert health.head_of(str(tmp_path), ["n1", "n2"]) == name


def test_preflight_step_runs_once_on_each_node() -> None:
    assert health.command("/top", ["n1", "n2"], ["--x"], "head", 77) == [
        "srun", "--nodelist=n1,n2", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
        "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--x", "python3", "/top", "preflight",
        "/top/health.json", "head", "77",
    ]  # fmt: skip


class FakeStep:
    """A preflight step that ends after some seconds; time passes when the supervisor sleeps."""

    def __init__(self, seconds: float) -> None:
        self.now, self.ends_at = 1000.0, 1000.0 + seconds
        self.actions: list[str] = []
        self.stdout = io.BytesIO()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000.0, "the step is not ended"

    def poll(self) -> int | None:
        return 0 if self.now >= self.ends_at else None

    def terminate(self) -> None:
        self.actions.append("terminate")

    def kill(self) -> None:
        self.actions.append("kill")

    def wait(self) -> None:
        self.actions.append("wait")


@pytest.mark.parametrize(
    ("seconds", "stop_at", "ended_at", "is_late"),
    [
        (5.0, 9999.0, 1005.0, False),
        (5000.0, 9999.0, 1060.0, True),
        (5000.0, 1007.0, 1007.0, True),
        (0.0, 1000.0, 1000.0, False),
    ],
)
def test_preflight_step_is_ended_after_a_minute_or_when_the_job_ends(
    monkeypatch: pytest.MonkeyPatch, seconds: float, stop_at: float, ended_at: float, is_late: bool
) -> None:
    process = FakeStep(seconds)
    fake = SimpleNamespace(Popen=lambda *_, **__: process, DEVNULL=0, PIPE=0, STDOUT=0)
    monkeypatch.setattr(health, "subprocess", fake)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: process.now, sleep=process.sleep))
    result = health.look(["srun"], has_ended=lambda: process.now >= stop_at)
    assert process.now == pytest.approx(ended_at, abs=0.06)
    assert (result.late, process.actions) == (
        ([True], ["terminate", "kill", "wait"]) if is_late else ([], ["wait"])
    )


class FakeSocket:
    """A socket with some datagrams; an OSError stands for a failed reception."""

    def __init__(self, *datagrams: bytes | OSError) -> None:
        self.datagrams, self.answers = list(datagrams), list[tuple[bytes, str]]()

    def recvfrom(self, _size: int) -> tuple[bytes, str]:
        datagram = self.datagrams.pop(0)
        if isinstance(datagram, OSError):
            raise datagram
        return datagram, "n2"

    def sendto(self, answer: bytes, peer: str) -> None:
        self.answers.append((answer, peer))

    def fileno(self) -> int:
        return 3 if self.datagrams else -1


def test_clock_server_answers_signed_requests_until_its_socket_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {b"signed": b"time", b"forged": b""}
    monkeypatch.setattr(network, "build_answer", lambda question, _key, _now: answers[question])
    clock = object.__new__(health.Clock)
    clock.key = "key"
    fake: Any = FakeSocket(b"signed", b"", b"forged", OSError(), b"signed", OSError())
    clock._socket = fake
    clock._serve()
    assert fake.answers == [(b"time", "n2"), (b"time", "n2")]


def test_events_without_findings_are_no_reports() -> None:
    fault = {"check": "gpus", "level": "bad", "evidence": "7 of 8"}
    events: list[dict[str, Any]] = [
        {"node": "", "findings": [fault]},
        {"node": "n1", "findings": "none"},
        {"node": "n2", "ok": True, "findings": []},
        {"node": "n3", "findings": [{"level": "bad"}, {"check": "disk"}]},
    ]
    assert health.of_events(events) == [
        Report("n2", True, []),
        Report("n3", False, [finding("disk", "", "")]),
    ]
