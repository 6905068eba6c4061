"""TCP ports of this machine for tests."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

import pytest

_claims: list[ExitStack] = []


def free_port(count: int = 1) -> int:
    """Return the first of `count` successive ports of 127.0.0.1 that nobody uses.

    No other test gets them before this process ends.

    They are above the ports of the labs' clusters, and below those that the scripts of jobs choose and that
    the kernel hands out to clients: of those, another process may get a port between this call and its use.
    """
    firsts = list(range(5000, 10001 - count))
    random.shuffle(firsts)
    for first in firsts:
        with suppress(OSError), ExitStack() as claims:
            for port in range(first, first + count):
                claims.enter_context(_claim(port))
            _claims.append(claims.pop_all())
            return first
    raise AssertionError("no free port on 127.0.0.1")


def _claim(port: int) -> socket.socket:
    """Claim a port of 127.0.0.1 until the returned socket is closed, at the latest when this process ends.

    The claim is an abstract Unix socket with the number of the port in its name. Such a name exists once in
    the network namespace, so that every process of the suite respects it.

    Raises:
        OSError: the port is claimed or in use.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0dtslurm-test-port-{port}")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        raise
    return claim


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
