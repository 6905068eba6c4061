"""The sshd's of the tests, and Slurm commands on the login node of the suite through one."""

from __future__ import annotations

import contextlib
import secrets
import socket
from unittest.mock import patch

import psutil
import pytest

from dtslurm.transport.connect import connect
from tests.sshd.fixtures import Login
from tests.sshd.servers import Server, SshLab


def test_a_server_that_goes_down_keeps_no_login_that_arrives_meanwhile(sshd_lab: SshLab) -> None:
    server = sshd_lab.server(f"s{secrets.token_hex(2)}")
    with socket.socket() as late, patch.object(Server, "connections", autospec=True) as connections:

        def log_in_late(_: Server) -> list[psutil.Process]:
            late.connect(("127.0.0.1", server.port))
            late.settimeout(1)
            with contextlib.suppress(TimeoutError):
                late.recv(100)  # what serves this login introduces itself
            return []

        connections.side_effect = log_in_late
        server.down()
        late.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert late.recv(100) == b""


@pytest.mark.slurm
@pytest.mark.parametrize("jumped", [False, True])
def test_sinfo_answers_over_ssh(sshd_login: Login, jumped: bool) -> None:
    transport = connect(sshd_login.jumped if jumped else sshd_login.host, env=sshd_login.lab.environ())
    done = transport.run(["sinfo", "-h", "-o", "%D"])
    assert done.stdout == "4\n"


@pytest.mark.slurm
def test_a_job_can_be_submitted_listed_and_cancelled_over_ssh(sshd_login: Login) -> None:
    transport = connect(sshd_login.host, env=sshd_login.lab.environ())
    script = b"#!/bin/bash\n#SBATCH -o /dev/null\nsleep 600\n"
    job = transport.run(["sbatch", "--parsable"], stdin=script).stdout.strip()
    assert transport.run(["squeue", "-h", "-j", job, "-o", "%i"]).stdout.strip() == job
    assert transport.run(["scancel", job]).ok
