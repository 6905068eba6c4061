"""Log streams over a real SSH connection that is broken repeatedly."""

from __future__ import annotations

import random

import pytest

from dtslurm.logs.lines import LogBlock
from dtslurm.services.logs import log_stream
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark
from dtslurm.transport.base import Transport
from dtslurm.transport.connect import connect
from tests.services.log_reading import Reader, Run, Writers
from tests.sshd.servers import Server, SshLab


@pytest.fixture(scope="module")
def login(sshd_lab: SshLab) -> Server:
    return sshd_lab.server("login", env={"HOME": str(sshd_lab.home("login"))})


@pytest.fixture
def openssh_transport(sshd_lab: SshLab, login: Server) -> Transport:
    transport = connect(login.alias, transport="openssh", env=sshd_lab.environ())
    transport.interactive = False  # type: ignore[attr-defined]
    return transport


def test_f57_no_log_line_is_lost_torn_or_repeated_over_broken_ssh_connections(
    run: Run, login: Server, openssh_transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_stream, "_LONGEST_PAUSE_S", 0.2)
    dice = random.Random(0)
    cuts = 0
    with LogStream(openssh_transport, LogRequest(str(run.path))) as stream:
        reader = Reader(stream)
        with Writers(run, 7) as writers:
            while writers.busy() or cuts < 4:
                writers.note(reader.read())
                if dice.random() < 0.02 and stream.connected and reader.items:
                    login.cut()
                    cuts += 1
        reader.drained()
    assert any("connection lost" in text for text in reader.notices())
    writers.check(reader)


def test_f75_a_thousand_logs_are_followed_over_one_ssh_session(
    run: Run, login: Server, openssh_transport: Transport
) -> None:
    for rank in range(1000):
        run.write(rank, b"line of %d\n" % rank)
    before = login.log.count("Starting session")
    with LogStream(openssh_transport, LogRequest(str(run.path), follow=False)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.END)
    ranks = {item.file.rank for item in reader.items if isinstance(item, LogBlock)}
    assert ranks == set(range(1000))
    assert login.log.count("Starting session") - before <= 2  # to follow, and to see to its end
