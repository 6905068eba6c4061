"""One step of the embedded scheduler's srun: its environment, registration, deadlines and exit code."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from dtslurm.worker.localslurm import process, srun
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.srun_options import plan
from dtslurm.worker.localslurm.state import State

JOB = {
    "id": 7,
    "nodes": 2,
    "ntasks": 4,
    "tasks_per_node": [2, 2],
    "cpus_per_node": [4, 4],
    "gpu_ids": [[], []],
    "kill_wait": 30.0,
}
SHARED = {
    "SLURM_DISTRIBUTION": "block",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_SRUN_COMM_HOST": "127.0.0.1",
    "SLURM_STEPID": "3",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "local[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_UMASK": "0027",
}
FAILED = "error: local{}: task {}: Exited with exit code {}"


class StepTest:
    """A step without processes, whose clock, messages and signals the test controls and records."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = State(str(folder))
        self.steps = Path(self.state.job_dir(7, "steps"))
        self.steps.mkdir(parents=True)
        self.registrations: list[IO[str]] = []
        self.now = 100.0
        self.messages: list[str] = []
        self.signals: list[tuple[str, int]] = []
        monkeypatch.setattr(srun, "say", self.messages.append)
        monkeypatch.setattr(srun, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(process, "descendants", lambda roots: {-pid for pid in roots})
        for name in ("send", "end"):
            monkeypatch.setattr(process, name, self._recorder(name))

    def _recorder(self, name: str) -> Any:
        def note(pids: set[int], number: int) -> None:
            assert pids == {-os.getpid()}
            self.signals.append((name, number))

        return note

    def launch(self, words: str = "-n4") -> srun.Launch:
        """Return a step whose tasks 0 to 3 run as processes 10 to 13."""
        launch = srun.Launch(self.state, JOB, plan([*words.split(), "true"], {}, JOB))
        launch.running = {10 + task.id: task for task in launch.tasks}
        return launch


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepTest:
    return StepTest(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("-n4", {"A": "1", "B": "2"}),
        ("-n4 --export=ALL,A=9", {"A": "9", "B": "2"}),
        ("-n4 --export=NONE", {}),
        ("-n4 --export=A", {"A": "1"}),
        ("-n4 --export=C=3,B", {"B": "2", "C": "3"}),
        ("-n4 -m cyclic -J other -c2 --export=NONE",
         {"SLURM_DISTRIBUTION": "cyclic", "SLURM_JOB_NAME": "other", "SLURM_CPUS_PER_TASK": "2"}),
    ],
)  # fmt: skip
def test_task_environment_has_the_exported_variables(words: str, more: dict[str, str]) -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "local1", "DTSLURM_LOCAL_STATE": "/s",
            "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    environ = {"A": "1", "B": "2", **kept}
    before = os.umask(0o027)
    try:
        result = srun.task_environment(plan([*words.split(), "true"], {}, JOB), 3, JOB, environ)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert result == {**kept, **SHARED, **more}


def test_tasks_of_a_machine_without_gpus_get_no_variable_for_gpus() -> None:
    result = srun.task_environment(plan(["--export=NONE", "-n4", "true"], {}, JOB), 3, JOB, {})
    assert {**result, "SLURM_UMASK": "0027"} == {**SHARED, "DTSLURM_LOCAL_STATE": ""}


@pytest.mark.parametrize(
    ("words", "no_kill", "kill_on_bad_exit", "wait"),
    [
        ("", False, False, 0.0),
        ("-K", False, True, 0.0),
        ("-K1 -W5", False, True, 5.0),
        ("-K0 -W0", False, False, 0.0),
        ("-K -k -W5", True, False, 0.0),
        ("-K --no-kill=off -W5", False, True, 5.0),
    ],
)
def test_step_ends_after_the_first_failure_as_its_options_state(
    step: StepTest, words: str, no_kill: bool, kill_on_bad_exit: bool, wait: float
) -> None:
    launch = step.launch(words)
    assert (launch.no_kill, launch.kill_on_bad_exit, launch.wait) == (no_kill, kill_on_bad_exit, wait)


def test_invalid_wait_is_refused(step: StepTest) -> None:
    with pytest.raises(Refused, match=r"^Invalid --wait specification: 1\.5$"):
        _ = step.launch("-W1.5").wait


def register(step: StepTest, words: str) -> dict[str, Any] | None:
    """Register a step; return its entry, or None if its CPUs are in use."""
    launch = step.launch(words)
    if not launch._try_register(str(step.steps)):
        return None
    assert launch.registration is not None
    step.registrations.append(launch.registration)
    return {"number": launch.number, **json.loads((step.steps / str(launch.number)).read_text())}


def test_steps_get_ascending_numbers_and_share_the_cpus_of_their_nodes(step: StepTest) -> None:
    (step.steps / "lock").touch()
    pid = os.getpid()
    assert register(step, "-N1 -n1 -c3") == {"number": 0, "pid": pid, "cpus": {"0": 3}}
    assert register(step, "-N2 -n2 -c1") == {"number": 1, "pid": pid, "cpus": {"0": 1, "1": 1}}
    assert register(step, "-N1 -n1 -c1") is None
    assert register(step, "-N2 -n2 -c1") is None  # the first node has no free CPU
    assert register(step, "-N1 -n1 -c1 -w local2") == {"number": 2, "pid": pid, "cpus": {"1": 1}}
    assert register(step, "-N1 -n1 --overlap") == {"number": 3, "pid": pid, "cpus": {}}
    for registration in step.registrations:
        registration.close()
    step.registrations.clear()
    assert register(step, "-N2 -n4") == {"number": 4, "pid": pid, "cpus": {"0": 4, "1": 4}}
    step.registrations[0].close()


def test_entry_that_its_step_has_not_written_yet_uses_no_cpus(step: StepTest) -> None:
    launch = step.launch()
    with (step.steps / "5").open("w") as entry:
        fcntl.flock(entry, fcntl.LOCK_EX)
        assert launch._count_used_cpus(str(step.steps)) == {}
        entry.write(json.dumps({"cpus": {"1": 2}}))
        entry.flush()
        assert launch._count_used_cpus(str(step.steps)) == {1: 2}
    assert launch._count_used_cpus(str(step.steps)) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_step_that_waits_for_cpus_can_be_cancelled(step: StepTest, number: int) -> None:
    launch = step.launch()
    launch.caught = [signal.SIGUSR1, number]
    with pytest.raises(Refused, match=r"^Cancelled pending job step$"):
        launch._check_cancelled()
    launch.caught = [signal.SIGUSR1, signal.SIGCONT]
    launch._check_cancelled()
    assert launch.caught == []


def test_signals_are_forwarded_in_the_order_of_their_arrival(step: StepTest) -> None:
    launch = step.launch()
    launch.caught = [signal.SIGUSR1, signal.SIGTERM]
    launch._forward_signals()
    assert step.signals == [("send", signal.SIGUSR1), ("send", signal.SIGTERM)]
    assert launch.caught == []


@pytest.mark.parametrize(
    ("words", "statuses", "codes", "messages", "deadlines"),
    [
        ("-n4", {10: 0}, (0, 0), [], (None, None)),
        (
            "-n4",
            {10: 3 << 8, 12: 2 << 8},
            (3, 0),
            [FAILED.format(1, 0, 3), FAILED.format(2, 2, 2)],
            (None, None),
        ),
        (
            "-n4",
            {10: signal.SIGKILL, 11: signal.SIGTERM, 13: 200 << 8},
            (200, 143),
            [
                "error: local1: task 0: Killed",
                "error: local1: task 1: Terminated",
                FAILED.format(2, 3, 200),
            ],
            (None, None),
        ),
        (
            "-n4 -K",
            {11: 1 << 8},
            (1, 0),
            [FAILED.format(1, 1, 1), "Terminating StepId=7.5"],
            (130.0, None),
        ),
        ("-n4 -K", {10: 0}, (0, 0), [], (None, None)),
        ("-n4 -W8", {10: 0}, (0, 0), [], (None, 108.0)),
        ("-N1 -n1 -K -W8", {10: 256}, (1, 0), [FAILED.format(1, 0, 1)], (None, None)),
        ("-n4", {99: 256}, (0, 0), [], (None, None)),  # a process that a task has left behind
    ],
)  # fmt: skip
def test_exits_of_tasks_set_the_exit_code_and_the_deadlines(
    step: StepTest,
    words: str,
    statuses: dict[int, int],
    codes: tuple[int, int],
    messages: list[str],
    deadlines: tuple[float | None, float | None],
) -> None:
    launch = step.launch(words)
    launch.number = 5
    before = len(launch.running)
    for pid, status in statuses.items():
        launch._record_exit(pid, status)
    assert (launch.exit_code, launch.signal_code) == codes
    assert step.messages == messages
    assert (launch.kill_at, launch.wait_until) == deadlines
    assert len(launch.running) == before - (0 if 99 in statuses else len(statuses))
    assert step.signals == ([("end", signal.SIGTERM)] if launch.kill_at else [])


def test_wait_starts_with_the_first_exit(step: StepTest) -> None:
    launch = step.launch("-n4 -W8")
    launch._record_exit(10, 0)
    step.now = 105.0
    launch._record_exit(11, 0)
    assert launch.wait_until == 108.0
    assert launch._check_deadlines() == 3.0
    step.now = 108.0
    assert launch._check_deadlines() == 30.0  # then the remaining processes are killed once more
    assert step.messages == ["First task exited 8s ago", "Terminating StepId=7.0"]
    assert step.signals == [("end", signal.SIGKILL)]


def test_terminated_step_is_killed_once_after_kill_wait(step: StepTest) -> None:
    launch = step.launch("-n4 -W40")
    assert launch._check_deadlines() == 60.0
    launch.terminate(signal.SIGTERM)
    launch.terminate(signal.SIGTERM)
    assert step.signals == [("end", signal.SIGTERM)]
    launch.wait_until = 120.0
    assert launch._check_deadlines() == 20.0
    step.now = 120.0
    assert launch._check_deadlines() == 10.0
    assert step.messages == ["Terminating StepId=7.0"]
    step.now = 130.0
    assert [launch._check_deadlines(), launch._check_deadlines()] == [60.0, 60.0]
    assert step.signals == [("end", signal.SIGTERM), ("send", signal.SIGKILL)]


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, "Killed"), (signal.SIGTERM, "Terminated"), (signal.SIGUSR1, "User defined signal 1"),
     (200, "signal 200")],
)  # fmt: skip
def test_signal_is_described_as_in_slurm(number: int, text: str) -> None:
    assert srun._describe_signal(number) == text


@pytest.mark.parametrize("job", ["", "x", "8"])
def test_srun_outside_a_job_of_the_scheduler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    state = State(str(tmp_path))
    Path(state.job_dir(7)).mkdir(parents=True)
    state.save(JOB)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert srun._load_own_job(state) == JOB
    monkeypatch.setenv("SLURM_JOB_ID", job)
    problem = "error: the embedded scheduler's srun works only inside one of its jobs (SLURM_JOB_ID)"
    with pytest.raises(Refused) as caught:
        srun._load_own_job(state)
    assert caught.value.problems == [problem]


def test_messages_are_written_in_the_format_of_srun(capfd: pytest.CaptureFixture[str]) -> None:
    srun.say("error: x")
    assert capfd.readouterr().err == "srun: error: x\n"
