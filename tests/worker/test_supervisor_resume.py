"""A supervisor that resumes after a killed supervisor: its attempt runs, has ended, or was recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import attempt_monitor, lease, main, step
from dtslurm.worker.supervisor.main import Supervisor
from tests.waiting import wait_until
from tests.worker.test_supervisor_attempts import begin
from tests.worker.test_supervisor_races import Clock


@pytest.fixture
def resuming(site: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A restarted supervisor; the killed one has begun attempt 0."""
    keeper = begin(site, "exit 9", "--resume")
    (site / "ranks/0").mkdir(parents=True)
    keeper.ledger.event("attempt", 0, nodes=["n1", "n2"], world_size=2, job_id="17", **keeper.start)
    monkeypatch.setattr(attempt_monitor, "time", Clock(lambda _now: None))
    return keeper


def step_runner_command(site: Path, nodes: str) -> list[str]:
    files = [str(site / "ranks/0/step.json"), str(site / "logs/0/step.log")]
    return [sys.executable, step.RUNNER, *files, str(site / "step.sh"), "0", nodes]


def start_step_runner(site: Path, script: str) -> Any:
    (site / "step.sh").write_text(script)
    runner = subprocess.Popen(step_runner_command(site, "n1,n2"))
    wait_until((site / "ranks/0/step.json").exists, "the step has begun")
    return runner


def command_of(pid: int | None) -> str:
    """Return the words of a process: its parent's until it has become what it is to run."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_text() if file.exists() else ""


def test_f85_resumed_supervisor_judges_an_ended_attempt_by_its_exit_code(
    site: Path, resuming: Supervisor
) -> None:
    start_step_runner(site, "exit 3\n").wait()
    for rank in (0, 1):
        (site / f"ranks/0/{rank}.json").write_text(json.dumps({"rank": rank, "host": "n1", "exit_code": 0}))
    assert resuming.run() == 0  # every rank had ended with 0
    [ended] = resuming.ledger.events("attempt_ended")
    assert (ended["attempt"], ended["cause"]) == (0, "done")
    assert len(resuming.ledger.events("attempt")) == 1


def test_f85_resumed_supervisor_judges_a_recorded_end_once(site: Path, resuming: Supervisor) -> None:
    end: dict[str, Any] = {
        "cause": "python-exception",
        "blame": "code",
        "summary": "ValueError",
        "exit_code": 1,
    }
    resuming.ledger.event("attempt_ended", 0, **end)
    assert resuming.run() == 1
    assert [item["action"] for item in resuming.ledger.events("decision")] == ["stop"]
    assert len(resuming.ledger.events("attempt_ended")) == 1


def test_f85_step_with_a_starting_runner_has_not_ended(site: Path, resuming: Supervisor) -> None:
    (site / "step.sh").write_text("exec sleep 600\n")
    late = subprocess.Popen(["sh", "-c", 'sleep 1; exec "$@"', "-", *step_runner_command(site, "n1")])
    running_step = step.RunningStep(str(site), 0, ["n1"], resume=True)
    assert running_step.code() is None
    running_step.end(5.0)
    late.wait()


def test_f85_step_with_a_killed_runner_has_ended(site: Path, resuming: Supervisor) -> None:
    runner = start_step_runner(site, "exec sleep 600\n")
    running_step = step.RunningStep(str(site), 0, ["n1"], resume=True)
    assert running_step.code() is None
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert running_step.code() == 137
    os.kill(json.loads((site / "ranks/0/step.json").read_text())["pid"], signal.SIGKILL)


def test_f85_step_with_a_running_launcher_continues_without_its_runner(
    site: Path, resuming: Supervisor
) -> None:
    note = site / "ranks/0/launcher.pid"
    runner = start_step_runner(site, f"export DTSLURM_ATTEMPT=$1\nsleep 600 &\necho $! >{note}\nwait\n")
    running_step = step.RunningStep(str(site), 0, ["n1"], resume=True)
    wait_until(lambda: "sleep" in command_of(running_step.launcher()), "the launcher has started")
    runner.send_signal(signal.SIGKILL)  # first, or it may still record how step.sh ends
    runner.wait()
    os.kill(json.loads((site / "ranks/0/step.json").read_text())["pid"], signal.SIGKILL)
    assert running_step.code() is None
    assert running_step.end(5.0) == 137
    assert not Path(f"/proc/{running_step.launcher()}/exe").exists()


def test_f85_resumed_step_can_be_ended(site: Path, resuming: Supervisor) -> None:
    runner = start_step_runner(site, "exec sleep 600\n")
    running_step = step.RunningStep(str(site), 0, ["n1"], resume=True)
    assert running_step.end(5.0) == 143
    assert runner.wait() == 143


def test_f40_attempt_replaced_by_another_copy_is_not_resumed(site: Path, resuming: Supervisor) -> None:
    lease.take(str(site), 1)
    assert resuming.run() == main.STALE


@pytest.mark.slow
def test_f85_attempts_of_an_earlier_job_start_are_not_resumed(site: Path, resuming: Supervisor) -> None:
    resuming.start["batch"] += 1
    (site / "step.sh").write_text("exit 5\n")
    resuming.run()
    assert [item["attempt"] for item in resuming.ledger.events("attempt")][:2] == [0, 1]
