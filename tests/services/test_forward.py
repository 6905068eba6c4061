"""Ports of this machine that lead to a node: their form, who may use them, and what is waited for."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.roles import InstanceState, RoleState
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import RankTelemetry, RunTelemetry
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.observe.inside import forward, running_process
from dtslurm.services.observe.inside.local_ports import (
    LocalPort,
    PortMapping,
    comes_from_own_user,
    parse_port,
)
from dtslurm.services.observe.inside.running_process import ProcessFinder
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.slurm.commands import step_for_ports
from tests.conftest import skip_or_fail

NOBODY = 65534


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("8888", PortMapping(8888)),
        ("9000:8888", PortMapping(8888, 9000)),
        ("0:8888", PortMapping(8888, 0)),
        ("http", PortMapping("http")),
        ("9000:http", PortMapping("http", 9000)),
    ],
)
def test_port_is_read(text: str, mapping: PortMapping) -> None:
    assert parse_port(text, allows_names=True) == mapping


@pytest.mark.parametrize(
    "text", ["", ":", ":80", "80:", "0", "65536", "-1", "1:2:3", "a:80", "x y", "8888\n", "٣", "1e3", "80:0"]
)
def test_malformed_port_is_refused(text: str) -> None:
    with pytest.raises(RequestInvalid, match="is not a port: write PORT or LOCAL:PORT"):
        parse_port(text, allows_names=True)


def test_name_of_a_port_needs_a_role() -> None:
    with pytest.raises(RequestInvalid, match="a port has a name only in a role"):
        parse_port("http", allows_names=False)


def test_port_in_use_is_refused_with_a_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(RequestInvalid, match=f"port {number} of this machine is in use") as refused:
            LocalPort(PortMapping(8888), number)
    assert refused.value.hint == f"0:8888 takes a free port, {number + 1}:8888 another one"


def test_this_machine_listens_on_loopback_only() -> None:
    port = LocalPort(PortMapping(8888), 0)
    try:
        assert port._listener.getsockname() == ("127.0.0.1", port.number)
        assert port._listener.family is socket.AF_INET
    finally:
        port.close()


CONNECT = """
import encodings.idna, os, socket, sys  # before the change of user, who may not read Python's files
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.recv(1)
"""


@pytest.mark.parametrize("uid", [None, NOBODY])
def test_only_connections_of_the_own_user_are_taken(uid: int | None) -> None:
    if uid is not None and os.getuid() != 0:
        skip_or_fail("root, to become another user")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        argv = [sys.executable, "-c", CONNECT, str(listener.getsockname()[1])]
        with subprocess.Popen([*argv, *([str(uid)] if uid is not None else [])]) as program:
            connection, _ = listener.accept()
            with connection:
                assert comes_from_own_user(connection) is (uid is None)
            program.wait(60)


def test_closed_connection_counts_as_another_users() -> None:
    """The kernel shows the sockets that nobody has as root's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        client.sendall(b"x")
        connection, _ = listener.accept()
        with connection:
            client.close()
            assert not comes_from_own_user(connection)
        reset = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.close()
            assert not comes_from_own_user(connection)


def test_step_takes_nothing_of_the_job_and_its_program_fits_into_one_argument() -> None:
    argv = step_for_ports("17", "n2", ["true"])
    assert {"--jobid=17", "--nodelist=n2", "--overlap", "--mem=0", "--gres=none", "--ntasks=1"} <= set(argv)
    assert not any(word.startswith("--input") for word in argv)
    assert len(inline_program(forward._MODULES, "sys.exit(module.main())")) < 100_000


# ---- What is waited for ----


def rank(number: int, *, ended: int | None = None, host: str = "n1") -> RankTelemetry:
    return RankTelemetry(rank=number, host=host, pid=100 + number, started=1, ended=ended)


def finder(
    monkeypatch: pytest.MonkeyPatch,
    telemetry: RunTelemetry,
    *,
    needs_port_names: bool = False,
    **selector: Any,
) -> ProcessFinder:
    record: Any = type(
        "Record",
        (),
        {
            "world_size": 2,
            "array": None,
            "run_dir": "/runs/a",
            "name": "a",
            "job_id": "17",
            "has_session": False,
        },
    )
    monkeypatch.setattr(running_process, "read_telemetry", lambda *arguments: telemetry)
    monkeypatch.setattr(running_process, "role_names", lambda record: ("trainer", ["rollout"]))
    context: Any = None
    return ProcessFinder(
        context,
        record,
        ProcessSelector(**selector),
        task=None,
        needs_port_names=needs_port_names,
        say=lambda text: None,
    )


STATUS = JobStatus(job_id="17", state=JobState.RUNNING, nodelist="n[1-2]")


def instance(number: int, state: str, **ports: int) -> InstanceState:
    return InstanceState(number=number, state=state, node="n2", ports=ports)


def with_roles(*instances: InstanceState) -> RunTelemetry:
    return RunTelemetry(now=0.0, roles=(RoleState(name="rollout", instances=instances),) if instances else ())


@pytest.mark.parametrize(
    ("selector", "telemetry", "reason"),
    [
        ({}, RunTelemetry(now=0.0), "no rank of job 17 is running"),
        ({"ranks": ((1, 1),)}, RunTelemetry(now=0.0, ranks={0: rank(0)}), "rank 1 of job 17 is not running"),
        ({"node": "n2"}, RunTelemetry(now=0.0, ranks={0: rank(0)}), "no rank of job 17 runs on 'n2'"),
        ({"role": "rollout"}, with_roles(), "job 17 has no role 'rollout'"),
        ({"role": "rollout"}, with_roles(instance(0, "waiting")), "no instance of rollout in job 17"),
        ({"role": "rollout/0"}, with_roles(instance(0, "failed")), "no instance of rollout/0 in job 17"),
    ],
)
def test_process_that_may_still_start_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, selector: dict[str, Any], telemetry: RunTelemetry, reason: str
) -> None:
    found = finder(monkeypatch, telemetry, **selector)._find(STATUS)
    assert isinstance(found, str)
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("selector", "telemetry", "problem"),
    [
        (
            {"ranks": ((1, 1),)},
            RunTelemetry(now=0.0, ranks={0: rank(0), 1: rank(1, ended=5)}),
            "rank 1 of job 17 is not running",
        ),
        ({"node": "n9"}, RunTelemetry(now=0.0, ranks={0: rank(0)}), "no rank of job 17 runs on 'n9'"),
        ({"role": "judge"}, with_roles(instance(0, "ready")), "job 17 has no role 'judge'"),
        ({"role": "rollout/7"}, with_roles(instance(0, "ready")), "no instance of rollout/7"),
        ({"role": "rollout"}, with_roles(instance(0, "ended")), "no instance of rollout"),
    ],
)
def test_process_that_never_starts_is_refused(
    monkeypatch: pytest.MonkeyPatch, selector: dict[str, Any], telemetry: RunTelemetry, problem: str
) -> None:
    with pytest.raises(RequestInvalid, match=problem):
        finder(monkeypatch, telemetry, **selector)._find(STATUS)


def test_rank_that_the_run_never_has_is_refused_before_the_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RequestInvalid, match="the run has no rank 2, only ranks 0 to 1"):
        finder(monkeypatch, RunTelemetry(now=0.0), ranks=((2, 2),)).wait()


def test_after_a_restart_the_same_rank_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    search = finder(monkeypatch, RunTelemetry(now=0.0, ranks={0: rank(0), 1: rank(1)}))
    found = search._find(STATUS)
    assert not isinstance(found, str)
    assert found.process.variables == {"RANK": "0"}
    search.was_found = True
    only_rank_1 = RunTelemetry(now=0.0, ranks={0: rank(0, ended=5), 1: rank(1)})
    monkeypatch.setattr(running_process, "read_telemetry", lambda *arguments: only_rank_1)
    assert isinstance(search._find(STATUS), str)
    moved = RunTelemetry(now=0.0, ranks={0: rank(0, host="n2"), 1: rank(1)})
    monkeypatch.setattr(running_process, "read_telemetry", lambda *arguments: moved)
    again = search._find(STATUS)
    assert not isinstance(again, str)
    assert again.process.node == "n2"


def test_instance_is_the_same_and_its_ports_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    search = finder(monkeypatch, with_roles(instance(0, "starting")), role="rollout", needs_port_names=True)
    assert search._find(STATUS) == "rollout/0 of job 17 has not opened its ports"
    both = with_roles(instance(0, "ready", http=20001), instance(1, "ready", http=20002))
    monkeypatch.setattr(running_process, "read_telemetry", lambda *arguments: both)
    found = search._find(STATUS)
    assert not isinstance(found, str)
    assert (found.process.label, found.process.ports) == ("rollout/0", {"http": 20001})
