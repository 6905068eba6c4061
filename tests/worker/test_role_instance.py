"""One instance of a role: its start, its address, its exit code and its end, without a process of its own."""

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

from dtslurm.worker.supervisor import slurm
from dtslurm.worker.supervisor.roles import instance as instances
from dtslurm.worker.supervisor.roles.instance import Instance
from dtslurm.worker.supervisor.step import RUNNER
from tests.worker.test_role_plan import plan_of, role


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Instance:
    """The second instance of a role with two ports, at a time that does not pass."""
    fake = SimpleNamespace(monotonic=lambda: 50.0, time=lambda: 1000.06)
    monkeypatch.setattr(instances, "time", fake)
    plan = plan_of(tmp_path, role("rollout", ports=("http", "grpc")))
    return Instance(str(tmp_path), plan.roles[0], 1, 2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """The programs that were started, with the options of their start."""
    programs: list[tuple[list[str], dict[str, Any]]] = []

    def start(words: list[str], **options: Any) -> SimpleNamespace:
        programs.append((words, options))
        return SimpleNamespace(pid=4, poll=lambda: None)

    fake = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(instances, "subprocess", fake)
    return programs


def record(instance: Instance, name: str, document: object) -> None:
    """Write a file of the current start of an instance."""
    path = Path(instance.folder, "ranks", str(instance.start), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def begin(instance: Instance, **env: str) -> None:
    instance.begin("/top", ["n3", "n4"], {"http": 30002, "grpc": 30003}, 4, env)


# ---- Start ----


def test_new_instance_has_neither_started_nor_an_address(instance: Instance) -> None:
    assert instance.describe() == {
        "instance": 1, "state": "waiting", "node": "", "gpus": None, "start": -1, "restarts": 0,
        "started": 0.0, "changed": 0.0, "host": "", "ports": {}, "url": "",
    }  # fmt: skip
    assert not instance.was_ready


@pytest.mark.parametrize(("folders", "start"), [([], -1), (["0"], 0), (["9", "10", "notes"], 10)])
def test_numbers_of_starts_continue_those_in_the_run_directory(
    instance: Instance, folders: list[str], start: int
) -> None:
    for name in folders:
        Path(instance.folder, "ranks", name).mkdir(parents=True)
    assert Instance(instance.run_dir, instance.role, 1, 2).start == start


@pytest.mark.parametrize(("gpus", "text"), [(None, "all"), ([], ""), ([4, 5], "4,5")])
def test_start_gives_the_step_its_ports_gpus_and_files(
    instance: Instance,
    started: list[tuple[list[str], dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[int] | None,
    text: str,
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "12")
    instance.start, instance.gpus = 4, gpus
    begin(instance, DTSLURM_ROLE_JUDGE_URLS="http://n1:30000")
    [(words, options)] = started
    ranks, logs = (f"{instance.folder}/{name}/5" for name in ("ranks", "logs"))
    script = f"{instance.run_dir}/role-rollout.sh"
    assert words == [sys.executable, RUNNER, f"{ranks}/step.json", f"{logs}/step.log", script, "n3,n4"]
    env = options.pop("env")
    assert options == dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    assert {name: value for name, value in env.items() if name.startswith("DTSLURM_ROLE")} == {
        "DTSLURM_ROLE": "rollout",
        "DTSLURM_ROLE_INSTANCE": "1",
        "DTSLURM_ROLE_START": "5",
        "DTSLURM_ROLE_LOG": f"{logs}/rank-0.log",
        "DTSLURM_ROLE_FILE": f"{ranks}/address.json",
        "DTSLURM_ROLE_GPUS": text,
        "DTSLURM_ROLE_JUDGE_URLS": "http://n1:30000",
    }
    assert {name: value for name, value in env.items() if name.startswith("DTSLURM_PORT")} == {
        "DTSLURM_PORT_STEP": "4",
        "DTSLURM_PORT_HTTP": "30002",
        "DTSLURM_PORT_GRPC": "30003",
    }
    assert "SLURM_NTASKS" not in env
    assert Path(ranks).is_dir()
    assert Path(logs).is_dir()


@pytest.mark.usefixtures("started")
def test_start_forgets_the_address_and_the_load_of_the_start_before(instance: Instance) -> None:
    for start in range(3):
        instance.host, instance.ports = "n9", {"http": 1}
        instance.load, instance.requests = {"waiting": 1.0}, [0.0, 1.0]
        (Path(instance.folder) / f"ranks/{start}").mkdir(parents=True)  # an interrupted start left it
        begin(instance)
        assert (instance.start, instance.host, instance.ports) == (start, "", {})
        assert instance.load == {}
        assert instance.requests is None
    assert (instance.state, instance.node, instance.code()) == (instances.STARTING, "n3,n4", None)
    assert (instance.started_at, instance.changed_at, instance.answered_at) == (1000.06, 1000.06, 50.0)


def test_instance_was_ready_from_its_first_ready_state_on(instance: Instance) -> None:
    states = (instances.STARTING, instances.UNRESPONSIVE, instances.WAITING, instances.READY)
    seen = []
    for state in (*states, instances.STARTING):
        instance.set_state(state)
        seen.append(instance.was_ready)
    assert seen == [False, False, False, True, True]


# ---- Address ----


@pytest.mark.parametrize(
    ("address", "is_known", "ports", "url"),
    [
        ({"host": "n3", "ports": {"http": 8000, "grpc": 8001}}, True, {"http": 8000, "grpc": 8001}, 8000),
        ({"host": "n3", "ports": {"grpc": 8001, "http": "x"}}, True, {"grpc": 8001}, 8001),
        ({"host": "n3", "ports": {}}, True, {}, None),
        ({"host": 3, "ports": {"http": 8000}}, False, {}, None),
        ({"host": "n3", "ports": [8000]}, False, {}, None),
        ({"ports": {"http": 8000}}, False, {}, None),
        ({"host": "n3"}, False, {}, None),
        ([], False, {}, None),
    ],
)
def test_address_is_known_once_the_task_has_written_it(
    instance: Instance, address: object, is_known: bool, ports: dict[str, int], url: int | None
) -> None:
    assert not instance.find_address()
    record(instance, "address.json", address)
    assert instance.find_address() is is_known
    assert (instance.host, instance.ports) == ("n3" if is_known else "", ports)
    assert instance.url == ("" if url is None else f"http://n3:{url}")
    record(instance, "address.json", {"host": "n4", "ports": {}})
    assert instance.find_address()
    assert instance.host == ("n3" if is_known else "n4")  # it does not change during a start


def test_url_needs_a_host(instance: Instance) -> None:
    instance.ports = {"http": 8000}
    assert instance.url == ""


# ---- Takeover of a running instance ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ([], 0, None, 0, 0.0, instances.WAITING, False)),
        (
            {"node": "n3,n4", "start": 2, "gpus": [1, "x", 3], "restarts": 4, "started": 9.5,
             "state": "ready"},
            (["n3", "n4"], 2, [1, 3], 4, 9.5, instances.UNRESPONSIVE, True),
        ),
        (
            {"node": "n3", "start": "2", "gpus": [], "restarts": None, "started": None, "state": "starting"},
            (["n3"], 0, [], 0, 0.0, instances.STARTING, False),
        ),
        ({"gpus": "all", "state": "ended"}, ([], 0, None, 0, 0.0, instances.ENDED, False)),
    ],
)  # fmt: skip
def test_takeover_restores_what_the_killed_supervisor_recorded(
    instance: Instance, values: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    instance.adopt(values)
    restored = (
        instance.nodes, instance.start, instance.gpus, instance.restarts, instance.started_at,
        instance.state, instance.was_ready,
    )  # fmt: skip
    assert restored == expected
    assert instance.answered_at == 50.0  # its silence counts from now on


# ---- Exit code ----


@pytest.mark.parametrize(
    ("polled", "code"), [(None, None), (0, 0), (3, 3), (-signal.SIGTERM, 143), (-signal.SIGKILL, 137)]
)
def test_exit_code_of_an_own_process_is_that_of_a_shell(
    instance: Instance, polled: int | None, code: int | None
) -> None:
    record(instance, "step.json", {"exit_code": 9})
    instance._process = SimpleNamespace(poll=lambda: polled)
    assert instance.code() == code


@pytest.mark.parametrize(
    ("document", "running", "code"),
    [
        ({"exit_code": 0}, True, 0),
        ({"exit_code": 7, "runner": 12}, True, 7),
        ({"runner": 12}, True, None),
        ({"runner": 12}, False, 137),  # it was killed, or another program has its process id
        ({"exit_code": "7"}, False, 137),
        ({}, False, 137),
    ],
)
def test_exit_code_of_a_taken_over_instance_is_the_recorded_one(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, document: object, running: bool, code: int | None
) -> None:
    record(instance, "step.json", document)
    path = f"{instance.folder}/ranks/-1/step.json" if running else "x"
    texts = {"/proc/12/cmdline": f"python3\0{RUNNER}\0{path}\0"}
    monkeypatch.setattr(instances, "text_of", texts.get)
    assert instance.code() == code


# ---- End ----


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals sent to processes; the process 13 has ended."""
    sent: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid == 13:
            raise ProcessLookupError

    monkeypatch.setattr(instances, "os", SimpleNamespace(kill=kill, path=os.path, environ=os.environ))
    return sent


@pytest.mark.parametrize(
    ("document", "pids"),
    [({"pid": 11, "runner": 12}, [11]), ({"pid": 13}, [13]), ({"pid": "11"}, []), ({}, [])],
)
def test_end_sends_term_to_the_step(
    instance: Instance, signals: list[tuple[int, int]], document: object, pids: list[int]
) -> None:
    record(instance, "step.json", document)
    instance.terminate()
    assert signals == [(pid, signal.SIGTERM) for pid in pids]


@pytest.mark.parametrize(
    ("document", "process", "pids"),
    [
        ({"pid": 11, "runner": 12}, 4, [11, 12]),
        ({"pid": 13, "runner": 13}, 4, [13, 13]),
        ({}, 4, [4]),  # its runner has recorded nothing yet
        ({}, None, []),
    ],
)
def test_forced_end_kills_the_step_and_its_runner(
    instance: Instance,
    signals: list[tuple[int, int]],
    document: object,
    process: int | None,
    pids: list[int],
) -> None:
    record(instance, "step.json", document)
    if process is not None:
        instance._process = SimpleNamespace(pid=process)
    instance.kill()
    assert signals == [(pid, signal.SIGKILL) for pid in pids]


@pytest.mark.parametrize(
    ("step", "on_this_machine", "is_cancelled"),
    [("71.3", False, True), ("71.3", True, False), ("71", False, False), (None, False, False)],
)
def test_forced_end_cancels_the_step_of_slurm(
    instance: Instance,
    monkeypatch: pytest.MonkeyPatch,
    step: str | None,
    on_this_machine: bool,
    is_cancelled: bool,
) -> None:
    calls: list[tuple[list[str], float]] = []
    monkeypatch.setattr(slurm, "call", lambda words, patience_s: calls.append((words, patience_s)))
    monkeypatch.delenv("SLURM_LOCAL_STATE", raising=False)
    if on_this_machine:
        monkeypatch.setenv("SLURM_LOCAL_STATE", "/tmp/state")
    record(instance, "address.json", {"host": "n3", "ports": {}, "step": step})
    instance.kill()
    assert calls == ([(["scancel", "--signal=KILL", "71.3"], 5.0)] if is_cancelled else [])


def test_forced_end_of_an_instance_in_a_component_cancels_the_step_of_that_component(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(slurm, "call", lambda words, _patience_s: calls.append(words))
    monkeypatch.setenv("SLURM_JOB_ID_HET_GROUP_2", "73")
    instance.role = instance.role._replace(component=2)
    record(instance, "address.json", {"host": "n3", "ports": {}, "step": "71.3"})
    instance.kill()
    assert calls == [["scancel", "--signal=KILL", "73.3"]]


def test_description_rounds_times_and_has_a_known_load(instance: Instance) -> None:
    instance.started_at, instance.load = 7.25001, {"waiting": 2.0}
    instance.set_state(instances.READY)
    values = instance.describe()
    assert (values["started"], values["changed"], values["load"]) == (7.3, 1000.1, {"waiting": 2.0})
    assert instance.node == ""
