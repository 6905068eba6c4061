"""Fixtures with sshd's, for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab.cluster import SlurmLab
from tests.sshd.servers import NoSshd, SshLab, program, ssh_lab


@pytest.fixture(scope="session")
def sshd_software() -> None:
    """Skip or fail the test if ssh or sshd is not installed."""
    from tests.conftest import skip_or_fail

    try:
        for name in ("ssh", "sshd", "ssh-keygen", "setpriv"):
            program(name)
    except NoSshd as error:
        skip_or_fail(f"a real sshd: {error}", "tests/sshd/install.sh")


@pytest.fixture(scope="module")
def sshd_lab(sshd_software: None) -> Iterator[SshLab]:
    """An empty lab for a module's own servers."""
    with ssh_lab() as lab:
        yield lab


@dataclass(frozen=True)
class Login:
    """A login node of the suite's Slurm.

    Attributes:
        lab: its sshd's and the client's configuration.
        host: its name for ssh; reached directly.
        jumped: another name of it; reached through a jump host that runs no commands.
        env: what dtslurm needs in its environment to reach it by these names.
    """

    lab: SshLab
    host: str
    jumped: str
    env: dict[str, str]


@pytest.fixture(scope="session")
def sshd_login(sshd_software: None, slurm_lab: SlurmLab) -> Iterator[Login]:
    """A login node whose sessions know the shared cluster's Slurm; the client needs to know nothing of it."""
    with ssh_lab() as lab:
        lab.server("jump", lines=["ForceCommand /bin/false"])
        server = lab.server("login", env={**slurm_lab.env, "HOME": str(lab.home("login"))})
        lab.host("login-jump", server.port, "ProxyJump jump")
        yield Login(lab, "login", "login-jump", lab.env)
