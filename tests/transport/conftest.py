"""The transports that must behave alike, each on a host of its own kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.transport.base import Transport
from dtslurm.transport.connect import connect
from tests import disks
from tests.sshd.servers import SshLab
from tests.transport.linking import Reach

REMOTE = ("openssh", "paramiko")


def reach(lab: SshLab, host: str, transport: str) -> Transport:
    """The transport to a host of the lab, as a program without a terminal has it."""
    result = connect(host, transport=transport, env=lab.environ())
    if hasattr(result, "interactive"):
        result.interactive = False
    return result


@pytest.fixture(scope="module")
def login(sshd_lab: SshLab) -> SshLab:
    """The module's lab with an ordinary login node ``login``."""
    sshd_lab.server(
        "login", env={"HOME": str(sshd_lab.home("login")), "SLURM_JOB_ID": "1", "SLURM_CONF": "c"}
    )
    return sshd_lab


@pytest.fixture(params=["local", *REMOTE])
def there(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Every transport, to this machine or to the ordinary login node."""
    if request.param == "local":
        transport = connect(None)
    else:
        transport = reach(request.getfixturevalue("login"), "login", request.param)
    yield transport
    transport.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with disks.small_disk(tmp_path / "disk", "size=64k,nr_inodes=10") as folder:
        yield folder


@pytest.fixture(params=REMOTE)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def to(kind: str, sshd_lab: SshLab) -> Iterator[Reach]:
    """A transport of either kind to a host of the lab."""
    made: list[Transport] = []

    def make(host: str) -> Transport:
        made.append(reach(sshd_lab, host, kind))
        return made[-1]

    yield make
    for transport in made:
        transport.close()
