"""Links that break during a command: OpenSSH and paramiko against real SSH servers."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from dtslurm.errors import (
    CommandTimeout,
    HostUnavailable,
    TransportError,
)
from tests.sshd.proxy import Proxy
from tests.sshd.servers import SshLab
from tests.transport.linking import Reach, do_when, name_for, server
from tests.waiting import busyness, wait_until


def test_f57_command_fails_with_unknown_effects_when_the_server_is_killed(
    sshd_lab: SshLab, to: Reach, tmp_path: Path
) -> None:
    result = server(sshd_lab, "plain")
    there = to("plain")
    note = tmp_path / "begun"
    killer = threading.Thread(target=do_when, args=(note.exists, result.cut))
    killer.start()
    with pytest.raises(TransportError, match="broke while sh ran; its effects are unknown"):
        there.run(["sh", "-c", f"echo part; touch {note}; sleep 30"], timeout=60)
    killer.join()
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f57_stream_fails_when_the_connection_is_reset(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    result = server(sshd_lab, "plain")
    with Proxy(result.port) as proxy:
        there = to(name_for(sshd_lab, proxy, result))
        with there.stream(["sh", "-c", "echo one; sleep 30"]) as stream:
            assert next(stream) == b"one\n"
            proxy.cut()
            with pytest.raises(TransportError, match="broke while"):
                next(stream)
        assert there.run(["echo", "again"]).stdout == "again\n"


def test_f16_file_is_unchanged_after_the_link_is_cut_during_put(
    sshd_lab: SshLab, to: Reach, tmp_path: Path
) -> None:
    result = server(sshd_lab, "plain")
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with Proxy(result.port, delay=0.005) as proxy:
        there = to(name_for(sshd_lab, proxy, result))
        there.open()
        start = proxy.passed
        cutter = threading.Thread(target=do_when, args=(lambda: proxy.passed > start + 3_000_000, proxy.cut))
        cutter.start()
        with pytest.raises(TransportError):
            there.put(b"new" * 30_000_000, str(target))
        cutter.join()
    assert target.read_bytes() == b"old"
    wait_until(lambda: list(tmp_path.iterdir()) == [target])


def test_f57_stopped_server_causes_a_timeout_and_recovers(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "stopped")
    there = to("stopped")
    assert there.run(["echo", "x"]).stdout == "x\n"
    result.signal(signal.SIGSTOP)
    try:
        with pytest.raises((CommandTimeout, HostUnavailable), match="did not answer"):
            there.run(["echo", "x"], timeout=3)
    finally:
        result.signal(signal.SIGCONT)
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f57_frozen_network_causes_a_timeout(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "plain")
    with Proxy(result.port) as proxy:
        there = to(name_for(sshd_lab, proxy, result, f"ConnectTimeout {int(10 * busyness())}"))
        with there.stream(["sh", "-c", "echo on; sleep 60"]) as stream:
            assert next(stream) == b"on\n"
            proxy.freeze()
            with pytest.raises((CommandTimeout, HostUnavailable), match="did not answer"):
                there.run(["echo", "x"], timeout=3)


def test_f57_link_lost_between_commands_is_restored(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "plain")
    there = to("plain")
    there.run(["true"])
    result.cut()
    wait_until(lambda: not result.connections())
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f2_command_ends_after_its_client_is_killed(sshd_lab: SshLab, kind: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    server(sshd_lab, "plain")
    note = tmp_path / "pid"
    code = (
        "import sys\nfrom dtslurm.transport.connect import connect\n"
        f"connect('plain', transport={kind!r}).run(['sh', '-c', 'echo $$ > {note}; sleep 600'], "
        f"timeout={5 * busyness()})"
    )
    client = subprocess.Popen([sys.executable, "-c", code], env=sshd_lab.environ(), stdin=subprocess.DEVNULL)
    wait_until(lambda: note.exists() and note.read_text().strip())
    client.kill()
    client.wait()
    pid = int(note.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
