"""The node's end of the relay: what it answers, when it ends, and which services it connects to."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.lib import sockets
from dtslurm.worker.lib.sockets import TcpSocket
from dtslurm.worker.relay import connections as wire
from dtslurm.worker.relay import relay
from dtslurm.worker.relay.relay import PortRelay
from tests.ports import listen
from tests.waiting import wait_until

PID = 77
Turn = bytes | float | Callable[[], bytes]


class Client:
    """The client of a relay, and its clock: each turn is bytes, a silence in seconds, or makes bytes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns: list[Turn] = []
        self.ends_at = float("inf")  # of the process
        self.looks = 0  # at the process
        self.is_closed = False
        self._decoder = wire.FrameDecoder(is_greeted=False)
        self.frames: list[wire.Frame] = []
        self.pinged_at: list[float] = []

    def select(self, readable: list[int], _writable: list[int], _other: list[int], limit: float) -> Any:
        if self.turns and isinstance(self.turns[0], float):
            self.now += limit
            self.turns[0] -= limit
            if self.turns[0] <= 0:
                del self.turns[0]
            return [], [], []
        return readable, [], []

    def read(self, descriptor: int, size: int) -> bytes:
        assert (descriptor, size) == (0, wire.LARGEST)
        turn = self.turns.pop(0) if self.turns else b""
        assert not isinstance(turn, float)
        return turn if isinstance(turn, bytes) else turn()

    def write(self, descriptor: int, data: memoryview) -> int:
        assert descriptor == 1
        if self.is_closed:
            raise BrokenPipeError
        part = bytes(data[:7])  # as a pipe that is almost full
        for frame in self._decoder.feed(part):
            self.frames.append(frame)
            self.pinged_at += [self.now] if frame[0] == wire.PING else []
        return len(part)

    def exit(self, code: int) -> None:
        raise SystemExit(code)

    def started_at(self, pid: int) -> float:
        assert pid == PID
        self.looks += 1
        return 5.0 if self.now < self.ends_at else float("inf")

    def run(self, *turns: Turn) -> int:
        """Relay for these turns and then the end of the client; return the exit code."""
        self.turns = list(turns)
        return PortRelay(PID).run()

    def received(self, kind: int) -> list[tuple[int, bytes]]:
        return [(number, payload) for own, number, payload in self.frames if own == kind]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    result = Client()
    own = {"read": result.read, "write": result.write, "_exit": result.exit}
    monkeypatch.setattr(relay, "os", SimpleNamespace(**{**vars(os), **own}))
    monkeypatch.setattr(relay, "select", SimpleNamespace(select=result.select))
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: result.now))
    monkeypatch.setattr(relay, "stacks", SimpleNamespace(started_at=result.started_at))
    monkeypatch.setattr(relay, "TEST_S", 0.0)  # most of these clients do not test
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return result


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A service of the user on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as result:
        result.settimeout(60)
        yield result


def listening(address: str, uid: int) -> TcpSocket:
    return TcpSocket((address, 80), ("0.0.0.0", 0), listens=True, uid=uid, is_open=True)


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


# ---- When it ends ----


def test_client_that_sends_nothing_is_considered_gone_after_two_minutes(client: Client) -> None:
    assert client.run(1000.0) == 0
    assert 120 < client.now - 1000 <= 124
    assert client.pinged_at == [1000.0 + 12 * number for number in range(1, 11)]  # a turn after 10 seconds


def test_client_that_answers_pings_keeps_the_relay(client: Client) -> None:
    pong = wire.encode(wire.PONG, 0)
    assert client.run(100.0, pong, 100.0, pong, 100.0) == 0
    assert client.now == 1300.0


def test_relay_ends_within_seconds_when_its_process_does(client: Client) -> None:
    client.ends_at = 1050
    assert client.run(100.0) == 3
    assert 1050 <= client.now < 1056


def test_busy_relay_looks_at_its_process_as_rarely_as_an_idle_one(client: Client) -> None:
    def pong() -> bytes:
        client.now += 0.5
        return wire.encode(wire.PONG, 0)

    client.run(*[pong] * 40)
    assert 8 <= client.looks <= 11


def test_malformed_bytes_end_the_relay_with_their_problem(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.run(wire.HEAD.pack(wire.LARGEST + 1, wire.DATA, 1)) == 1
    assert capsys.readouterr().err == "dtslurm: the client sent a frame of 1048577 bytes\n"


def test_closed_output_ends_the_relay(client: Client) -> None:
    def close() -> bytes:
        client.is_closed = True
        return wire.encode(wire.ASK, 1, wire.PORT.pack(80))

    with pytest.raises(SystemExit) as ended:
        client.run(close)
    assert ended.value.code == 0


# ---- Its address ----


def test_client_tests_with_a_nonce_whether_it_reaches_the_node(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TEST_S", 60.0)
    received: list[bytes] = []

    def test() -> bytes:
        [(_, payload)] = client.received(wire.HELLO)
        hello = json.loads(payload)
        assert hello["address"] == "127.0.0.1"
        with socket.create_connection((hello["address"], hello["port"]), timeout=60) as connection:
            received.extend([b"".join(iter(lambda: connection.recv(100), b"")), hello["nonce"].encode()])
        return b""

    assert client.run(test) == 0
    assert received[0] == received[1]
    assert len(received[0]) == 16


def test_node_without_a_way_to_the_client_is_not_tested(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "no address")
    client.run()
    [(_, payload)] = client.received(wire.HELLO)
    hello = json.loads(payload)
    assert (hello["address"], hello["port"]) == ("", 0)


def test_node_that_cannot_listen_is_not_tested(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "find_own_address", lambda _client: "192.0.2.1")  # for documentation
    client.run()
    [(_, payload)] = client.received(wire.HELLO)
    hello = json.loads(payload)
    assert (hello["address"], hello["port"]) == ("", 0)


def test_way_to_the_client_may_be_of_ipv6() -> None:
    with listen("::1"):
        assert relay.find_own_address("::1") == "::1"


# ---- What it connects to ----


def test_ports_are_described_by_who_listens_there(client: Client, listener: socket.socket) -> None:
    ports = {5: port_of(listener), 6: 0}
    client.run(
        b"".join(wire.encode(wire.ASK, number, wire.PORT.pack(port)) for number, port in ports.items())
    )
    assert {number: json.loads(payload) for number, payload in client.received(wire.ANSWER)} == {
        5: {"address": "127.0.0.1", "problem": ""},
        6: {"address": "", "problem": "nothing"},
    }


def test_port_of_another_user_is_described_as_such(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "find_listeners", lambda _port: [listening("0.0.0.0", os.getuid() + 1)])
    client.run(wire.encode(wire.ASK, 5, wire.PORT.pack(80)))
    [(_, payload)] = client.received(wire.ANSWER)
    assert json.loads(payload) == {"address": "", "problem": "other user"}


def test_opened_port_is_connected_in_both_directions(client: Client, listener: socket.socket) -> None:
    services: list[socket.socket] = []
    received: list[bytes] = []

    def answer() -> bytes:
        service, _ = listener.accept()
        services.append(service)
        service.sendall(b"hello")
        wait_until(lambda: (9, b"hello") in client.received(wire.DATA))
        return wire.encode(wire.DATA, 9, b"thanks") + wire.encode(wire.END, 9)

    def end() -> bytes:
        with services[0] as service:
            service.settimeout(60)
            received.append(b"".join(iter(lambda: service.recv(100), b"")))
        wait_until(lambda: client.received(wire.END))
        return b""

    assert client.run(wire.encode(wire.OPEN, 9, wire.PORT.pack(port_of(listener))), answer, end) == 0
    assert received == [b"thanks"]


def test_port_without_a_service_breaks_the_connection_with_the_reason(client: Client) -> None:
    def wait() -> bytes:
        wait_until(lambda: client.received(wire.CLOSE))
        return b""

    assert client.run(wire.encode(wire.OPEN, 9, wire.PORT.pack(0)), wait) == 0
    assert client.received(wire.CLOSE) == [(9, b"nothing listens there now")]


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "::1"),
        ("::", "::1"),
    ],
)
def test_service_is_reached_at_the_address_where_it_listens(host: str, reached: str) -> None:
    with listen(host) as listener, relay.connect(port_of(listener)) as connection:
        assert connection.getpeername()[:2] == (reached, port_of(listener))
        assert connection.gettimeout() is None  # a connection may be silent for long


@pytest.mark.parametrize(("uids", "is_reached"), [([1], False), ([1, 0], True), ([0], True)])
def test_service_of_another_user_is_not_connected(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, uids: list[int], is_reached: bool
) -> None:
    """The user's own process listens here, but the kernel's table says whose it is."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(
        sockets, "find_listeners", lambda _port: [listening("127.0.0.1", uid) for uid in uids]
    )
    if is_reached:
        relay.connect(port_of(listener)).close()
        return
    with pytest.raises(OSError, match="nothing listens there now"):
        relay.connect(port_of(listener))


# ---- The program ----


@pytest.mark.parametrize(("node", "is_found", "code"), [("n2", True, 0), ("n2", False, 3), ("n1", True, 3)])
def test_program_relays_for_a_process_of_this_node_only(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node: str,
    is_found: bool,
    code: int,
) -> None:
    process = {"label": "rank 3", "node": node, "variables": {"RANK": "3"}, "pid": PID}
    request = {"run_dir": "/runs/a", "by_node": True, "process": process}
    argument = base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()
    asked: list[tuple[object, str]] = []

    def find(target: object, run_dir: str) -> int | None:
        asked.append((target, run_dir))
        return PID if is_found else None

    monkeypatch.setattr(sys, "argv", ["relay", argument])
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setattr(relay, "find_process", find)
    assert relay.main() == code
    assert asked == ([(process, "/runs/a")] if node == "n2" else [])
    assert capsys.readouterr().err == ("" if code == 0 else "dtslurm: rank 3 no longer runs\n")
    assert len(client.received(wire.HELLO)) == (1 if code == 0 else 0)
