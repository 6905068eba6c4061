"""The relay of connections: its frames, its rules, and what it takes for a service of the user."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.worker.lib import sockets
from dtslurm.worker.lib.sockets import TcpSocket
from dtslurm.worker.relay import connections as wire
from dtslurm.worker.relay.connections import Connections, FrameDecoder, ProtocolError
from dtslurm.worker.relay.relay import describe_port, find_own_address
from tests.ports import listen
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from dtslurm.worker.relay import relay; sys.exit(relay.main())"
MINE, OTHER = 1000, 1001

RUN_DIR = f"/runs/{os.getpid()}"  # no process of another test is of this run


def listening(address: str, uid: int = MINE) -> TcpSocket:
    return TcpSocket((address, 80), ("0.0.0.0", 0), listens=True, uid=uid, is_open=True)


@pytest.mark.parametrize(
    ("listeners", "problem", "address"),
    [
        ([], "nothing", ""),
        ([listening("0.0.0.0", OTHER)], "other user", ""),
        ([listening("127.0.0.1")], "", ""),
        ([listening("0.0.0.0")], "", "10.0.0.5"),
        ([listening("::")], "", "10.0.0.5"),
        ([listening("10.0.0.5")], "", "10.0.0.5"),
        ([listening("10.9.9.9")], "", ""),  # of a network that the login node may not be on
        ([listening("10.0.0.5", OTHER), listening("127.0.0.1")], "", ""),
        ([listening("0.0.0.0", uid=0)], "", "10.0.0.5"),  # a service of the system
    ],
)
def test_only_services_of_the_user_are_reached(
    listeners: list[TcpSocket], problem: str, address: str
) -> None:
    assert describe_port(listeners, MINE, "10.0.0.5") == {"problem": problem, "address": address}


def test_service_on_loopback_is_reached_directly_from_the_same_host() -> None:
    assert describe_port([listening("127.0.0.1")], MINE, "127.0.0.1")["address"] == "127.0.0.1"
    assert describe_port([listening("0.0.0.0")], MINE, None)["address"] == ""


def test_address_towards_the_client_is_that_of_the_route() -> None:
    assert find_own_address("127.0.0.1") == "127.0.0.1"
    assert find_own_address("no address") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("00000000:0016", ("0.0.0.0", 22)),
        ("00000000000000000000000000000000:1F90", ("::", 8080)),
        ("00000000000000000000000001000000:1F90", ("::1", 8080)),
        ("0000000000000000FFFF00000100007F:1F90", ("127.0.0.1", 8080)),
    ],
)
def test_addresses_of_the_kernel_are_read(text: str, address: tuple[str, int]) -> None:
    assert sys.byteorder == "little", "these lines were written on such a machine"
    assert sockets.parse_address(text) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_sockets_of_this_process_are_found_in_the_tables(host: str) -> None:
    with listen(host) as listener:
        port = listener.getsockname()[1]
        assert [item.uid for item in sockets.find_listeners(port)] == [os.getuid()]
    assert sockets.find_listeners(port) == []


FRAMES = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 1 << 31), st.binary(max_size=50)))


@given(FRAMES, st.lists(st.integers(1, 30)))
def test_frames_are_decoded_however_their_bytes_are_split(
    frames: list[tuple[int, int, bytes]], sizes: list[int]
) -> None:
    data = b"a prolog says hello\n" + wire.MAGIC + b"".join(wire.encode(*frame) for frame in frames)
    result: list[wire.Frame] = []
    decoder, position = FrameDecoder(is_greeted=False), 0
    for size in [*sizes, len(data)]:
        result += decoder.feed(data[position : position + size])
        position += size
    assert result == frames
    assert decoder.unread == b""


def test_every_frame_ends_a_line() -> None:
    assert wire.encode(wire.DATA, 1, b"no line end").endswith(b"\n")  # srun passes on lines


@pytest.mark.parametrize(
    "data", [wire.HEAD.pack(wire.LARGEST + 1, wire.DATA, 1), b"x" * (wire.LARGEST + 1)], ids=["frame", "text"]
)
def test_endless_data_are_refused(data: bytes) -> None:
    decoder = FrameDecoder(is_greeted=data[:1] != b"x")
    with pytest.raises(ProtocolError):
        list(decoder.feed(data))


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Callable[[], Pair]]:
    """Makes connected sockets: the first is the relay's, the second that of a program."""
    made: list[socket.socket] = []

    def make() -> Pair:
        both = socket.socketpair()
        made.extend(both)
        return both

    yield make
    for item in made:
        item.close()


def test_end_that_sends_more_than_its_window_is_refused(pair: Callable[[], Pair]) -> None:
    relay, _ = pair()
    ends = Connections(lambda *frame: None, lambda *problem: None)
    ends.add(1, lambda: relay)
    with pytest.raises(ProtocolError, match="more data than it may send"):
        any(ends.receive(wire.DATA, 1, b"x" * wire.CHUNK) for _ in range(100))  # type: ignore[func-returns-value]
    ends.close()


def test_malformed_frames_are_refused(pair: Callable[[], Pair]) -> None:
    relay, _ = pair()  # here, because the thread of the connection may begin after the test
    ends = Connections(lambda *frame: None, lambda *problem: None)
    ends.add(1, lambda: relay)
    for kind, payload in ((wire.CREDIT, b""), (99, b"")):
        with pytest.raises(ProtocolError):
            ends.receive(kind, 1, payload)
    with pytest.raises(ProtocolError, match="a second connection"):
        ends.add(1, lambda: relay)
    ends.receive(99, 2, b"")  # about a connection that is closed here
    ends.close()


class Ends:
    """One end whose other end is the test: the frames that it sends, and the reasons that it reports."""

    def __init__(self) -> None:
        self.frames: list[wire.Frame] = []
        self.problems: list[tuple[int, str]] = []
        self.own = Connections(
            lambda *frame: self.frames.append(frame), lambda *problem: self.problems.append(problem)
        )

    def sent(self, kind: int) -> bytes:
        return b"".join(payload for own, _, payload in list(self.frames) if own == kind)

    def is_connected(self, program: socket.socket) -> None:
        """Wait until bytes of the program pass, and forget them."""
        program.sendall(b"x")
        wait_until(lambda: self.sent(wire.DATA) == b"x")
        self.frames.clear()


@pytest.fixture
def ends() -> Iterator[Ends]:
    result = Ends()
    yield result
    result.own.close()


def test_end_may_fill_its_window_and_again_what_was_delivered(pair: Callable[[], Pair], ends: Ends) -> None:
    relay, program = pair()
    ends.own.add(4, lambda: relay)
    halves = [b"x" * (wire.WINDOW // 2), b"y" * (wire.WINDOW // 2)]
    for half in halves:
        ends.own.receive(wire.DATA, 4, half)
    program.settimeout(60)
    left = wire.WINDOW
    while left:
        left -= len(program.recv(left))
    wait_until(lambda: len(ends.sent(wire.CREDIT)) == 2 * wire.SIZE.size)
    assert ends.frames == [(wire.CREDIT, 4, wire.SIZE.pack(len(half))) for half in halves]
    for half in halves:
        ends.own.receive(wire.DATA, 4, half)
    with pytest.raises(ProtocolError, match="more data than it may send"):
        ends.own.receive(wire.DATA, 4, b"x" * (wire.WINDOW + 1))


def test_end_sends_no_more_than_its_credit(pair: Callable[[], Pair], ends: Ends) -> None:
    relay, program = pair()
    ends.own.add(4, lambda: relay)
    ends.own.receive(wire.CREDIT, 4, wire.SIZE.pack(1 << 30))  # but its window is all that it ever may
    data = os.urandom(2 * wire.WINDOW)
    threading.Thread(target=_send_and_end, args=(program, data), daemon=True).start()
    wait_until(lambda: len(ends.sent(wire.DATA)) >= wire.WINDOW)
    assert ends.sent(wire.DATA) == data[: wire.WINDOW]
    ends.own.receive(wire.CREDIT, 4, wire.SIZE.pack(5))
    wait_until(lambda: len(ends.sent(wire.DATA)) >= wire.WINDOW + 5)
    assert ends.sent(wire.DATA) == data[: wire.WINDOW + 5]
    assert max(len(payload) for _, _, payload in ends.frames) <= wire.CHUNK
    ends.own.receive(wire.CREDIT, 4, wire.SIZE.pack(wire.WINDOW))
    wait_until(lambda: ends.frames[-1][0] == wire.END)
    assert ends.sent(wire.DATA) == data


def _send_and_end(program: socket.socket, data: bytes) -> None:
    program.sendall(data)
    program.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("payload", "problems"),
    [
        (b"", []),
        (b"Connection refused", [(4, "Connection refused")]),
        (b"x" * 501, [(4, "x" * 500)]),
        (b"\xff", [(4, "\ufffd")]),
    ],
)
def test_connection_that_the_other_end_breaks_is_closed_with_its_reason(
    pair: Callable[[], Pair], ends: Ends, payload: bytes, problems: list[tuple[int, str]]
) -> None:
    relay, program = pair()
    ends.own.add(4, lambda: relay)
    ends.is_connected(program)
    for _ in range(2):
        ends.own.receive(wire.CLOSE, 4, payload)
    assert ends.problems == problems
    program.settimeout(60)
    assert program.recv(1) == b""
    again, other = pair()
    ends.own.add(4, lambda: again)  # its number is free again
    other.sendall(b"y")
    wait_until(lambda: ends.sent(wire.DATA) == b"y")
    assert ends.sent(wire.CLOSE) == b""  # the other end knows


def test_connection_with_both_ends_reached_is_forgotten(pair: Callable[[], Pair], ends: Ends) -> None:
    relay, program = pair()
    ends.own.add(4, lambda: relay)
    ends.is_connected(program)
    program.shutdown(socket.SHUT_WR)
    wait_until(lambda: ends.frames)
    ends.own.receive(wire.DATA, 4, b"bye")
    ends.own.receive(wire.END, 4, b"")
    program.settimeout(60)
    assert b"".join(iter(lambda: program.recv(100), b"")) == b"bye"
    wait_until(lambda: relay.fileno() == -1)
    assert ends.frames == [(wire.END, 4, b""), (wire.CREDIT, 4, wire.SIZE.pack(3))]
    ends.own.receive(99, 4, b"")  # about a connection that is closed here


def test_connection_that_is_closed_before_it_is_made_is_not_used(
    pair: Callable[[], Pair], ends: Ends
) -> None:
    relay, program = pair()
    may_connect = threading.Event()

    def connect() -> socket.socket:
        may_connect.wait(60)
        return relay

    ends.own.add(4, connect)
    ends.own.receive(wire.CLOSE, 4, b"")
    may_connect.set()
    program.settimeout(60)
    assert program.recv(1) == b""
    assert ends.frames == []


def joined() -> tuple[Connections, Connections, list[str]]:
    """Return two ends whose frames reach each other at once, and the problems of the first."""
    problems: list[str] = []

    def send_to_second(kind: int, number: int, payload: bytes) -> None:
        second.receive(kind, number, payload)

    def send_to_first(kind: int, number: int, payload: bytes) -> None:
        first.receive(kind, number, payload)

    first = Connections(send_to_second, lambda _, problem: problems.append(problem))
    second = Connections(send_to_first, lambda *problem: None)
    return first, second, problems


def join(first_socket: socket.socket, second_socket: socket.socket) -> None:
    """Relay between two sockets."""
    first, second, _ = joined()
    second.add(7, lambda: second_socket)
    first.add(7, lambda: first_socket)


def test_large_data_pass_with_the_end_of_each_direction(pair: Callable[[], Pair]) -> None:
    (first, client), (second, server) = pair(), pair()
    join(first, second)
    data = os.urandom(3 * wire.WINDOW + 17)

    def send() -> None:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)

    threading.Thread(target=send).start()
    received = b"".join(iter(lambda: server.recv(1 << 20), b""))
    assert received == data
    server.sendall(b"thanks")
    server.shutdown(socket.SHUT_WR)
    assert b"".join(iter(lambda: client.recv(100), b"")) == b"thanks"


def test_broken_connection_breaks_the_other_end(pair: Callable[[], Pair]) -> None:
    (first, client), (second, server) = pair(), pair()
    join(first, second)
    server.close()
    client.settimeout(60)
    assert client.recv(1) == b""
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        client.sendall(b"x" * (16 * wire.WINDOW))


def test_slow_reader_does_not_delay_other_connections(pair: Callable[[], Pair]) -> None:
    (first, client), (second, _) = pair(), pair()
    ends = joined()[:2]
    (third, other_client), (fourth, other_server) = pair(), pair()
    for number, sides in ((1, (first, second)), (2, (third, fourth))):
        for end, side in zip(ends, sides, strict=True):
            end.add(number, lambda side=side: side)  # type: ignore[misc]
    filler = threading.Thread(target=lambda: _fill(client), daemon=True)
    filler.start()
    filler.join(1.0)
    other_client.sendall(b"ping")
    other_server.settimeout(60)
    assert other_server.recv(10) == b"ping"


def _fill(client: socket.socket) -> None:
    try:
        client.sendall(b"x" * (16 * wire.WINDOW))  # blocks: nobody reads
    except OSError:
        return


def relay_of(pid: int | None, **variables: str) -> subprocess.Popen[bytes]:
    """Start the program as srun does."""
    process = {"label": "3", "node": "n1", "variables": variables, "pid": pid}
    request = {"run_dir": RUN_DIR, "by_node": False, "process": process}
    argument = base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, argument],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_relay_ends_with_the_process_of_the_job() -> None:
    environment = {"DTSLURM_RUN_DIR": RUN_DIR, "SLURM_PROCID": "0", "RANK": "3"}
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, **environment}) as process:
        try:
            with relay_of(process.pid, RANK="3") as relay:
                assert relay.stdout is not None
                assert relay.stdout.read(len(wire.MAGIC)) == wire.MAGIC
                process.kill()
                process.wait()
                assert relay.wait(60) == 3
        finally:
            process.kill()
    with relay_of(process.pid, RANK="3") as relay:
        _, errors = relay.communicate()
        assert errors == b"dtslurm: 3 no longer runs\n"
        assert relay.returncode == 3


def test_relay_ends_with_its_input() -> None:
    environment = {"DTSLURM_RUN_DIR": RUN_DIR, "SLURM_PROCID": "0", "RANK": "3"}
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, **environment}) as process:
        try:
            with relay_of(process.pid, RANK="3") as relay:
                assert relay.stdin is not None
                relay.stdin.close()
                assert relay.wait(60) == 0
        finally:
            process.kill()


def test_connection_that_cannot_be_made_is_reported() -> None:
    near, far, problems = joined()
    first, client = socket.socketpair()

    def refuse() -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    with client:
        near.add(1, lambda: first)
        far.add(1, refuse)
        wait_until(lambda: problems == ["Connection refused"])
        assert client.recv(1) == b""
