"""Slurm commands on the login node of the suite through a real sshd."""

from __future__ import annotations

import pytest

from dtslurm.transport.connect import connect
from tests.sshd.fixtures import Login

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("jumped", [False, True])
def test_sinfo_answers_over_ssh(sshd_login: Login, jumped: bool) -> None:
    transport = connect(sshd_login.jumped if jumped else sshd_login.host, env=sshd_login.lab.environ())
    done = transport.run(["sinfo", "-h", "-o", "%D"])
    assert done.stdout == "4\n"


def test_a_job_can_be_submitted_listed_and_cancelled_over_ssh(sshd_login: Login) -> None:
    transport = connect(sshd_login.host, env=sshd_login.lab.environ())
    script = b"#!/bin/bash\n#SBATCH -o /dev/null\nsleep 600\n"
    job = transport.run(["sbatch", "--parsable"], stdin=script).stdout.strip()
    assert transport.run(["squeue", "-h", "-j", job, "-o", "%i"]).stdout.strip() == job
    assert transport.run(["scancel", job]).ok
