"""Routes to a host, host keys, and unreachable hosts: OpenSSH and paramiko against real SSH servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtslurm.errors import (
    HostUnavailable,
    LoginRefused,
    RequestInvalid,
)
from dtslurm.transport.connect import connect
from tests.ports import free_port
from tests.sshd.proxy import Proxy
from tests.sshd.servers import SshLab, fingerprint, make_key, program
from tests.transport.linking import Reach, logins, name_for, server


def test_jump_host_is_used_with_a_single_login(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    jump = server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-jump", far_one.port, "ProxyJump jump")
    before = logins(jump)
    there = to("behind-jump")
    assert there.run(["echo", "x"]).stdout == "x\n"
    there.put(b"y" * 1_000_000, str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"y" * 1_000_000
    assert logins(jump) == before + 1


def test_two_jump_hosts_are_used(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    server(sshd_lab, "jump2", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-two", far_one.port, "ProxyJump jump,jump2")
    assert to("behind-two").run(["echo", "x"]).stdout == "x\n"


def test_proxy_command_is_used(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    ssh = f"{program('ssh')} -F {sshd_lab.config} -W %h:%p jump"
    sshd_lab.host("behind-command", far_one.port, f"ProxyCommand {ssh}")
    assert to("behind-command").run(["echo", "x"]).stdout == "x\n"


def test_jump_host_that_cannot_reach_the_host_is_reported(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    sshd_lab.host("behind-nothing", free_port(), "ProxyJump jump")
    with pytest.raises(HostUnavailable, match="the jump host cannot reach behind-nothing"):
        to("behind-nothing").run(["true"])


def test_c11_jump_host_with_an_unknown_key_is_refused(sshd_lab: SshLab, to: Reach) -> None:
    stranger = server(sshd_lab, "strange-jump", known=False)
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-strange", far_one.port, "ProxyJump strange-jump")
    with pytest.raises(LoginRefused, match="not known") as caught:
        to("behind-strange").run(["true"])
    assert fingerprint(stranger.folder / "hostkey") in caught.value.message


def test_commands_and_transfers_work_with_50_ms_latency(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    result = server(sshd_lab, "plain")
    with Proxy(result.port, delay=0.05) as proxy:
        there = to(name_for(sshd_lab, proxy, result))
        assert there.run(["echo", "x"]).stdout == "x\n"
        data = os.urandom(1 << 20) * 10
        there.put(data, str(tmp_path / "file"))
        assert there.get(str(tmp_path / "file")) == data
        with there.stream(["sh", "-c", "while read x; do echo got $x; done"]) as stream:
            for number in range(5):
                stream.send(f"{number}\n".encode())
            stream.close_stdin()
            assert b"".join(stream) == b"".join(f"got {number}\n".encode() for number in range(5))


# ---- keys of hosts


def test_c11_unknown_host_key_is_refused(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "unknown", known=False)
    before = sshd_lab.known_hosts.read_text()
    with pytest.raises(LoginRefused, match="the host key of unknown is not known on this machine") as caught:
        to("unknown").run(["true"])
    assert fingerprint(result.folder / "hostkey") in caught.value.message
    assert caught.value.hint
    assert not caught.value.transient
    assert sshd_lab.known_hosts.read_text() == before
    assert logins(result) == 0


def test_c11_changed_host_key_is_refused(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    result = server(sshd_lab, "changed", known=False)
    if f":{result.port} " not in sshd_lab.known_hosts.read_text():
        with sshd_lab.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{result.port} {make_key(tmp_path / 'other')}\n")
    with pytest.raises(LoginRefused, match="the host key of changed has changed") as caught:
        to("changed").run(["true"])
    assert fingerprint(result.folder / "hostkey") in caught.value.message
    assert str(sshd_lab.known_hosts) in "\n".join(caught.value.evidence)
    assert logins(result) == 0


def test_c11_revoked_host_key_is_refused(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "revoked")
    if "@revoked" not in sshd_lab.known_hosts.read_text():
        with sshd_lab.known_hosts.open("a") as file:
            file.write(f"@revoked * {result.host_key}\n")
    with pytest.raises(LoginRefused, match="was revoked"):
        to("revoked").run(["true"])
    assert logins(result) == 0


# ---- no link


def test_refused_connection_is_reported(sshd_lab: SshLab, to: Reach) -> None:
    sshd_lab.host("down", free_port())
    with pytest.raises(HostUnavailable, match="down refused the connection") as caught:
        to("down").run(["true"])
    assert caught.value.transient


def test_unresolvable_host_name_is_reported(sshd_lab: SshLab, to: Reach) -> None:
    sshd_lab.host("lost", 22, "HostName no-such-host.invalid")
    with pytest.raises(HostUnavailable, match="the name of lost cannot be resolved"):
        to("lost").run(["true"])


def test_silent_host_is_reported(sshd_lab: SshLab, to: Reach) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        sshd_lab.host("silent", silent.getsockname()[1], "ConnectTimeout 2")
        with pytest.raises(HostUnavailable, match="silent did not answer"):
            to("silent").run(["true"])
    sshd_lab.hosts = [host for host in sshd_lab.hosts if not host.startswith("Host silent\n")]


def test_f59_refused_login_is_not_repeated(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    result = server(sshd_lab, "plain")
    make_key(tmp_path / "wrong")
    sshd_lab.host(f"denied-{tmp_path.name}", result.port, f"IdentityFile {tmp_path}/wrong")
    # its own key comes first, the lab's second: leave only the wrong one
    lines = [line for line in sshd_lab.config.read_text().splitlines() if "/id" not in line]
    sshd_lab.config.write_text("\n".join(lines) + "\n")
    try:
        there = to(f"denied-{tmp_path.name}")
        with pytest.raises(LoginRefused, match="refused the login") as caught:
            there.run(["true"])
        assert "publickey" in caught.value.message
        assert not caught.value.transient
        before = result.log.count("Connection from")
        with pytest.raises(LoginRefused, match="refused the login"):
            there.run(["true"])
        assert result.log.count("Connection from") == before
    finally:
        sshd_lab.host("unused", result.port)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch /tmp/x", "a b", "a;b", "", "a\nb", "$(id)", "a/b"])
def test_c10_host_that_is_not_a_host_name_is_refused(kind: str, host: str) -> None:
    with pytest.raises(RequestInvalid, match="is not a host name"):
        connect(host, transport=kind)


@pytest.mark.parametrize("user", ["-l", "a b", "a;b", "", "a\nb"])
def test_c10_user_that_is_not_a_user_name_is_refused(kind: str, user: str) -> None:
    with pytest.raises(RequestInvalid, match="is not a user name"):
        connect("host", user=user, transport=kind)
