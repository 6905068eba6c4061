"""TCP ports of this machine for tests."""

from __future__ import annotations

import random
import socket

import pytest

_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, and that no other test gets before this process ends.

    It is above the ports of the labs' clusters, and below those that the scripts of jobs choose and that the
    kernel hands out to clients: of those, another process may get a port between this call and its use. The
    claim is an abstract socket: every process of this network sees it, and it dies with this process.
    """
    ports = list(range(5000, 10000))
    random.shuffle(ports)
    for port in ports:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0dtslurm-test-port-{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise AssertionError("no free port on 127.0.0.1")


def listen(host: str) -> socket.socket:
    """Return a socket that listens at a free port of an address of this machine.

    The test is skipped if the address is of IPv6, and the machine has none.
    """
    is_ipv6 = ":" in host
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    except OSError:
        if is_ipv6:
            pytest.skip("this machine has no IPv6")
        raise
