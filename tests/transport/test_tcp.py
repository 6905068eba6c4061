"""TCP connections from a host to another host, through every transport."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import TransportError
from dtslurm.transport.base import Transport
from tests.ports import free_port
from tests.sshd.servers import SshLab
from tests.transport.linking import Reach, logins, server
from tests.waiting import wait_until

HOST = "127.0.0.1"


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that answers when its client has sent all: the same bytes, then ``end``."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket) -> None:
    with connection:
        data = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        connection.sendall(data + b"end")


def exchange(there: Transport, port: int, data: bytes) -> bytes:
    """Send data to a port and return the answer, empty if there is no connection."""
    try:
        connection = there.connect_tcp(HOST, port)
    except TransportError:
        return b""
    connection.settimeout(60)

    def send() -> None:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    answer = b""
    with contextlib.suppress(OSError):
        while chunk := connection.recv(1 << 20):
            answer += chunk
    sender.join()
    connection.close()
    return answer


def test_bytes_and_the_end_of_each_direction_arrive(there: Transport, echo: int) -> None:
    there.open()
    data = os.urandom(3_000_000)
    assert exchange(there, echo, data) == data + b"end"
    assert exchange(there, echo, b"") == b"end"


def test_connection_that_nobody_accepts_has_no_bytes(there: Transport) -> None:
    there.open()
    assert exchange(there, free_port(), b"x") == b""
    assert there.run(["echo", "x"]).stdout == "x\n"


def test_login_node_may_forbid_it(sshd_lab: SshLab, to: Reach, echo: int) -> None:
    server(sshd_lab, "closed", lines=["AllowTcpForwarding no"])
    there = to("closed")
    there.open()
    assert exchange(there, echo, b"x") == b""
    assert there.run(["echo", "x"]).stdout == "x\n"


def test_connection_is_made_by_the_host_behind_the_jump_host(sshd_lab: SshLab, to: Reach, echo: int) -> None:
    jump = server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    behind = server(sshd_lab, "behind")
    sshd_lab.host("behind-jump", behind.port, "ProxyJump jump")
    before = logins(jump), logins(behind)
    there = to("behind-jump")
    there.open()
    for _ in range(2):
        assert exchange(there, echo, b"x") == b"xend"
    assert (logins(jump), logins(behind)) == (before[0] + 1, before[1] + 1)


def test_connections_need_a_login_and_are_made_again_after_a_lost_one(
    sshd_lab: SshLab, to: Reach, echo: int
) -> None:
    login = server(sshd_lab, "cut")
    there = to("cut")
    there.open()
    assert exchange(there, echo, b"x") == b"xend"
    before = logins(login)
    login.cut()
    wait_until(lambda: exchange(there, echo, b"x") == b"")
    assert logins(login) == before  # a thread could not prompt
    assert there.run(["echo", "x"]).stdout == "x\n"
    assert exchange(there, echo, b"x") == b"xend"


def test_forwarding_of_openssh_is_private_and_ends_with_close(sshd_lab: SshLab, to: Reach, echo: int) -> None:
    server(sshd_lab, "login2")
    there = to("login2")
    there.open()
    folder = sshd_lab.root / "run/dtslurm"

    def list_sockets() -> set[Path]:
        return {path for path in folder.iterdir() if path.is_socket()} if folder.is_dir() else set()

    before = list_sockets()
    for _ in range(3):
        there.connect_tcp(HOST, echo).close()
    new = list_sockets() - before
    assert len(new) == (1 if there.name == "openssh" else 0)
    for path in new:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    there.close()
    assert list_sockets() - before == set()
    if there.name == "openssh":
        assert there.run(["echo", "x"]).stdout == "x\n"  # the login goes on
