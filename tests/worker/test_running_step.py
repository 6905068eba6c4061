"""One attempt's step: its exit code, its signals and the end by force; and the verdict on its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.evidence import evidence
from dtslurm.worker.supervisor import agents, lease, step, verdict
from dtslurm.worker.supervisor.files import text_of
from dtslurm.worker.supervisor.step import RunningStep

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Machine:
    """The processes of a step; a test sets which signal ends it. Time passes when the supervisor sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.signals: list[tuple[float, int, int]] = []
        self.returncode: int | None = None
        self.ends_by: tuple[int, int] | None = None
        self.pid = 50
        self.files: dict[str, str] = {}
        self.environments: dict[int, dict[str, str]] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000.0, "the supervisor waits for ever"

    def start(self, command: list[str], **values: Any) -> Machine:
        self.started.append((command, values))
        return self

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.signals.append((self.now, 0, KILL))

    def wait(self) -> None:
        pass

    def send(self, pid: int, number: int) -> None:
        self.signals.append((self.now, pid, number))
        if self.ends_by == (pid, number):
            self.returncode = -number
        if pid == 404:
            raise ProcessLookupError

    def write(self, name: str, content: Any) -> None:
        (self.folder / "ranks/2").mkdir(parents=True, exist_ok=True)
        (self.folder / "ranks/2" / name).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    result = Machine(tmp_path)
    fake = SimpleNamespace(Popen=result.start, DEVNULL="null", STDOUT="output")
    monkeypatch.setattr(step, "subprocess", fake)
    monkeypatch.setattr(step, "time", result)
    monkeypatch.setattr(os, "kill", result.send)
    monkeypatch.setattr(step, "environment_of", lambda pid: result.environments.get(pid, {}))
    monkeypatch.setattr(
        step, "text_of", lambda path: result.files.get(path) if path.startswith("/proc/") else text_of(path)
    )
    return result


@pytest.fixture
def running(machine: Machine) -> RunningStep:
    return RunningStep(str(machine.folder), 2, ["n1", "n2"])


def resume(machine: Machine, **record: Any) -> RunningStep:
    machine.write("step.json", record)
    return RunningStep(str(machine.folder), 2, ["n1", "n2"], resume=True)


def test_step_is_started_by_its_runner(machine: Machine, running: RunningStep) -> None:
    folder = machine.folder
    [(command, values)] = machine.started
    assert command == [
        sys.executable, step.RUNNER, f"{folder}/ranks/2/step.json", f"{folder}/logs/2/step.log",
        f"{folder}/step.sh", "2", "n1,n2",
    ]  # fmt: skip
    assert values == {"stdin": "null", "stderr": "output"}
    assert Path(step.RUNNER).is_file()
    assert (folder / "ranks/2").is_dir()
    assert (running.ranks, running.logs) == (f"{folder}/ranks/2", f"{folder}/logs/2")


@pytest.mark.parametrize(("returncode", "code"), [(None, None), (0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_code_of_a_killed_step_is_128_plus_the_signal(
    machine: Machine, running: RunningStep, returncode: int | None, code: int | None
) -> None:
    machine.returncode = returncode
    assert running.code() == code


@pytest.mark.parametrize(
    ("record", "command", "env", "code"),
    [
        ({"runner": 60, "exit_code": 4}, "", {}, 4),
        ({"runner": 60, "exit_code": 0}, "ours", {}, 0),
        ({"runner": 60}, "ours", {}, None),
        ({"runner": 60}, "other", {}, 137),
        ({"runner": 60}, "", {"DTSLURM_RUN_DIR": "ours", "DTSLURM_ATTEMPT": "2"}, None),
        ({"runner": 60}, "", {"DTSLURM_RUN_DIR": "ours", "DTSLURM_ATTEMPT": "1"}, 137),
        ({"runner": 60}, "", {"DTSLURM_RUN_DIR": "other", "DTSLURM_ATTEMPT": "2"}, 137),
    ],
)
def test_step_of_a_killed_supervisor_runs_while_its_runner_or_its_launcher_lives(
    machine: Machine, record: dict[str, Any], command: str, env: dict[str, str], code: int | None
) -> None:
    path = f"{machine.folder}/ranks/2/step.json"
    machine.files["/proc/60/cmdline"] = "\0".join(
        ["python", "run", path if command == "ours" else "x" + path]
    )
    machine.environments[70] = {
        key: str(machine.folder) if value == "ours" else value for key, value in env.items()
    }
    machine.write("launcher.pid", "70\n")
    assert resume(machine, **record).code() == code


@pytest.mark.parametrize("appears_at", [None, 1004.0])
def test_resuming_supervisor_waits_for_a_runner_that_is_starting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, appears_at: float | None
) -> None:
    def sleep(seconds: float) -> None:
        machine.now += seconds
        assert machine.now < 2000.0
        if appears_at is not None and machine.now >= appears_at:
            machine.write("step.json", {"runner": 60})

    monkeypatch.setattr(machine, "sleep", sleep)
    RunningStep(str(machine.folder), 2, ["n1"], resume=True)
    assert machine.now == pytest.approx(appears_at or 1010.0, abs=0.15)
    assert machine.started == []


@pytest.mark.parametrize(
    ("returncode", "record", "result"),
    [
        (1, {"too_early": True}, (True, False)),
        (1, {"job_over": True}, (False, True)),
        (0, {"too_early": True, "job_over": True}, (False, False)),
        (1, {"too_early": "yes", "job_over": 1}, (False, False)),
        (1, {}, (False, False)),
    ],
)
def test_refused_step_came_too_early_or_too_late(
    machine: Machine, running: RunningStep, returncode: int, record: Any, result: tuple[bool, bool]
) -> None:
    machine.returncode = returncode
    machine.write("step.json", record)
    assert (running.came_too_early(), running.came_too_late()) == result


@pytest.mark.parametrize(
    ("text", "pid"), [("70\n", 70), ("", None), ("-1", None), ("srun", None), (None, None)]
)
def test_launcher_is_recorded_by_the_step(
    machine: Machine, running: RunningStep, text: str | None, pid: int | None
) -> None:
    if text is not None:
        machine.write("launcher.pid", text)
    assert running.launcher() == pid


@pytest.mark.parametrize(
    ("launcher", "record", "pid"),
    [
        ("70", {"pid": 60}, 70),
        ("", {"pid": 60}, 60),
        ("", {}, 50),
        ("404", {}, 404),
        ("", {"pid": "x"}, None),
    ],
)
def test_signal_goes_to_the_launcher_or_else_to_the_step(
    machine: Machine, running: RunningStep, launcher: str, record: dict[str, Any], pid: int | None
) -> None:
    machine.write("launcher.pid", launcher)
    machine.write("step.json", record)
    running.signal(signal.SIGUSR1)
    assert machine.signals == ([] if pid is None else [(1000.0, pid, signal.SIGUSR1)])


ESCALATION = [(1000, 70, TERM), (1005, 70, KILL), (1006, 60, KILL), (1012, 55, KILL)]


@pytest.mark.parametrize(
    ("ends_by", "attempt", "expected", "code"),
    [
        ((70, TERM), 2, ESCALATION[:1], 143),
        ((70, KILL), 2, ESCALATION[:2], 137),
        ((60, KILL), 2, ESCALATION[:3], 137),
        ((55, KILL), 2, ESCALATION, 137),
        (None, 2, ESCALATION, 1),
        ((70, KILL), 3, [(1000, 70, KILL)], 137),  # TERM would end a step of the new start
    ],
)
def test_step_is_ended_by_stronger_signals_one_after_another(
    machine: Machine,
    running: RunningStep,
    ends_by: tuple[int, int] | None,
    attempt: int,
    expected: list[tuple[int, int, int]],
    code: int,
) -> None:
    lease.take(str(machine.folder), attempt)
    machine.write("launcher.pid", "70")
    machine.write("step.json", {"pid": 60, "runner": 55})
    machine.ends_by = ends_by
    assert running.end(5.0) == code
    assert [(round(at), pid, number) for at, pid, number in machine.signals] == expected
    assert machine.now == pytest.approx(1013.0 if ends_by is None else machine.signals[-1][0], abs=0.5)


def test_runner_without_a_record_is_ended_by_its_process(machine: Machine, running: RunningStep) -> None:
    machine.ends_by = (machine.pid, KILL)
    lease.take(str(machine.folder), 3)
    assert running.end(5.0) == 137
    assert machine.signals == [(1000.0, 50, KILL)]


def test_step_that_has_ended_gets_no_signal(machine: Machine, running: RunningStep) -> None:
    machine.returncode = 7
    lease.take(str(machine.folder), 3)
    assert running.end(5.0) == 7
    assert (machine.signals, machine.now) == ([], 1000.0)


def test_agent_is_started_on_its_node_and_killed_with_the_step(
    machine: Machine, running: RunningStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "step_on", lambda top, node: (["srun", top, node], {"PATH": "/bin"}))
    log = machine.folder / "agent.log"
    running.start_agent("/top", "n2", str(log))
    running.start_agent("/top", "n2", "/no/such/folder/log")
    [_, (command, values)] = machine.started
    script = 'echo started && exec python3 "$0" node restarted'
    assert command == ["srun", "/top", "n2", "sh", "-c", script, "/top"]
    assert values["env"] == {"PATH": "/bin", "DTSLURM_ATTEMPT": "2"}
    assert (values["stdin"], values["stderr"], values["stdout"].name) == ("null", "output", str(log))
    machine.returncode = 3
    assert running.finish() == 3
    assert machine.signals == [(1000.0, 0, KILL)]


# ---- The verdict ----


@pytest.mark.parametrize(
    ("code", "first", "cause", "rank", "summary"),
    [
        (3, None, "exit-code", None, "the step ended with 3"),
        (139, None, "segfault", None, "the step ended with 139"),
        (137, None, "killed", None, "the step ended with 137"),
        (134, None, "abort", None, "the step ended with 134"),
        (137, [0, 134], "abort", 0, "rank 0 ended with 134"),
        (1, [5, 2], "exit-code", 5, "rank 5 ended with 2"),
    ],
)
def test_exit_code_alone_gives_a_cause(
    code: int, first: list[int] | None, cause: str, rank: int | None, summary: str
) -> None:
    assert verdict.by_code(code, first) == {
        "cause": cause, "blame": "unknown", "rank": rank, "summary": summary,
    }  # fmt: skip


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    events = [{"event": "hang", "attempt": 1}, {"event": "hang", "attempt": 2}, {"event": "requeue"}]
    result: dict[str, Any] = {"events": events, "first_failures": [[3, 139], [1, 2]]}
    monkeypatch.setattr(evidence, "findings", lambda request: {**result, "request": request})
    return result


def run_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], pythons: list[str]
) -> tuple[dict[str, Any], list[tuple[list[str], dict[str, Any]]]]:
    """Return the verdict, and the interpreters that ran the rules, each with its request."""
    calls: list[tuple[list[str], dict[str, Any]]] = []

    def run(command: list[str], **values: Any) -> SimpleNamespace:
        calls.append((command, {**json.loads(values["input"]), "timeout": values["timeout"]}))
        answer = answers[command[0]]
        if isinstance(answer, Exception):
            raise answer
        if values["check"] and answer == b"":
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(stdout=answer)

    (tmp_path / "rules.json").write_text('{"signatures": [{"id": "mine"}]}')
    monkeypatch.setattr(subprocess, "run", run)
    return verdict.verdict_on(str(tmp_path), "/run", 2, 8, 1, pythons), calls


def test_rules_judge_the_evidence_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: dict[str, Any]
) -> None:
    (tmp_path / "rules.zip").touch()
    answers = {sys.executable: b'{"cause": "nan-loss"}'}
    result, [(command, request)] = run_rules(tmp_path, monkeypatch, answers, ["python3.12"])
    assert result == {"cause": "nan-loss"}
    assert command == [sys.executable, "-I", f"{tmp_path}/rules.zip"]
    signatures = [{"id": "mine"}]
    question = {"run_dir": "/run", "attempt": 2, "signatures": signatures}
    assert request == {
        "found": {**findings, "events": [{"event": "hang", "attempt": 2}], "request": question},
        "signatures": signatures,
        "world_size": 8,
        "facts": {"state": "FAILED", "over": True, "exit_code": 1, "world_size": 8, "attempt": 2},
        "timeout": 60.0,
    }


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", OSError(), ValueError()])
def test_next_python_runs_the_rules_if_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: dict[str, Any], answer: Any
) -> None:
    (tmp_path / "rules.zip").touch()
    answers = {sys.executable: answer, "old": answer, "new": b'{"cause": "hang"}'}
    result, calls = run_rules(tmp_path, monkeypatch, answers, ["old", "", "new", "newer"])
    assert result == {"cause": "hang"}
    assert [command[0] for command, _ in calls] == [sys.executable, "old", "new"]


def test_exit_code_of_the_first_failed_rank_decides_without_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: dict[str, Any]
) -> None:
    result, calls = run_rules(tmp_path, monkeypatch, {}, ["new"])
    assert (result["cause"], result["rank"], calls) == ("segfault", 3, [])
    findings["first_failures"] = []
    assert run_rules(tmp_path, monkeypatch, {}, [])[0]["summary"] == "the step ended with 1"


def test_exit_code_of_the_step_decides_if_the_evidence_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_request: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(evidence, "findings", fail)
    assert run_rules(tmp_path, monkeypatch, {}, [])[0]["summary"] == "the step ended with 1"
