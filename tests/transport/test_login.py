"""Logins: second factors, wrong answers, keys with passphrases, and prompts."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typing_extensions import Self

from dtslurm.errors import HostUnavailable, LoginRefused
from dtslurm.transport.connect import connect
from dtslurm.transport.ssh.paramiko_ssh import ParamikoTransport
from tests.sshd.servers import AS_ROOT, Server, SshLab, program
from tests.transport.conftest import REMOTE, reach

CODE = "271828"
ANSWERS = Callable[[str, bool], str]

needs_pam = pytest.mark.skipif(not AS_ROOT, reason="only root may give sshd a PAM stack of its own")


@pytest.fixture(scope="module")
def factors(sshd_lab: SshLab) -> SshLab:
    """A host that wants a key and a code, and one that wants the code alone."""
    folder = sshd_lab.root / "pam.d"
    folder.mkdir()
    check = sshd_lab.root / "check"
    check.write_text(f"#!/bin/sh\n[ \"$(tr -d '\\0')\" = {CODE} ]\n")
    check.chmod(0o755)
    stack = f"auth required pam_exec.so quiet expose_authtok {check}\n"
    text = "account required pam_permit.so\nsession required pam_permit.so\n"
    (folder / "sshd").write_text(f"{stack}auth required pam_permit.so\n{text}")
    bind = f'mount --bind {folder} /etc/pam.d && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", bind, "sh"]
    common = ["UsePAM yes", "KbdInteractiveAuthentication yes", "MaxAuthTries 6"]
    for alias, methods in (("both", "publickey,keyboard-interactive"), ("code", "keyboard-interactive")):
        sshd_lab.server(
            alias,
            lines=[*common, f"AuthenticationMethods {methods}"],
            prefix=prefix,
            env={"HOME": str(sshd_lab.home(alias))},
        )
    return sshd_lab


def asked_by(lab: SshLab, host: str, answers: list[str]) -> tuple[ParamikoTransport, list[tuple[str, bool]]]:
    seen: list[tuple[str, bool]] = []

    def prompt(question: str, echo: bool) -> str:
        seen.append((question, echo))
        return answers[min(len(seen), len(answers)) - 1]

    transport = connect(host, transport="paramiko", env=lab.environ(), prompt=prompt)
    assert isinstance(transport, ParamikoTransport)
    return transport, seen


def attempts(one: Server) -> int:
    return one.log.count("Connection from")


class Terminal:
    """A program at a terminal of its own, and a person who reads and types."""

    def __init__(self, lab: SshLab, code: str) -> None:
        self.said, self.over = "", False
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", code], lab.environ())

    def wait_until(self, pattern: str, limit: float = 60) -> None:
        end = time.monotonic() + limit
        while not re.search(pattern, self.said):
            assert time.monotonic() < end, f"no {pattern} in {self.said!r}"
            ready, _, _ = select.select([self.handle], [], [], 0.2)
            if ready:
                try:
                    self.said += os.read(self.handle, 65536).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    assert re.search(pattern, self.said), f"no {pattern} in {self.said!r}"
                    return

    def interrupt(self) -> None:
        """Press Ctrl-C once the program in front waits: ssh loses what comes between its prompt and that."""
        while psutil.Process(os.tcgetpgrp(self.handle)).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.02)
        os.write(self.handle, b"\x03")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the program, if a failed test left it: others would wait for its login."""
        if not self.over:
            for item in {os.tcgetpgrp(self.handle), self.pid}:
                os.kill(item, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.handle)

    def type(self, text: str) -> None:
        self.said = ""
        os.write(self.handle, text.encode() + b"\n")

    def end(self) -> int:
        self.wait_until("END")
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        self.over = True
        return os.waitstatus_to_exitcode(status)


def at_terminal(lab: SshLab, host: str, transport: str = "openssh") -> Terminal:
    code = (
        "from dtslurm.errors import DtslurmError\nfrom dtslurm.transport.connect import connect\n"
        f"try: print('GOT', connect({host!r}, transport={transport!r}).run(['echo', 'x']).stdout)\n"
        "except DtslurmError as error: print('\\n'.join(error.lines()))\n"
        "print('END')"
    )
    return Terminal(lab, code)


@needs_pam
@pytest.mark.parametrize("transport", REMOTE)
@pytest.mark.parametrize("host", ["both", "code"])
def test_second_factor_is_entered_at_the_terminal(factors: SshLab, host: str, transport: str) -> None:
    factors.logout()
    with at_terminal(factors, host, transport) as result:
        result.wait_until("Password:")
        result.type(CODE)
        result.wait_until("GOT x")
        assert result.end() == 0
        assert CODE not in result.said


@needs_pam
def test_single_login_serves_later_commands_without_a_terminal(factors: SshLab) -> None:
    factors.logout()
    with at_terminal(factors, "both") as result:
        result.wait_until("Password:")
        result.type(CODE)
        result.wait_until("GOT x")
        result.end()
        before = attempts(factors.servers["both"])
        assert reach(factors, "both", "openssh").run(["echo", "y"]).stdout == "y\n"
        assert attempts(factors.servers["both"]) == before


@needs_pam
@pytest.mark.parametrize("transport", REMOTE)
def test_f59_three_wrong_codes_end_in_a_single_login_attempt(factors: SshLab, transport: str) -> None:
    factors.logout()
    before = attempts(factors.servers["both"])
    with at_terminal(factors, "both", transport) as result:
        for _ in range(3):
            result.wait_until("Password:")
            result.type("wrong")
        result.wait_until("error: both (refused the login|did not accept)")
        result.end()
        assert attempts(factors.servers["both"]) == before + 1


@needs_pam
@pytest.mark.parametrize("transport", REMOTE)
@pytest.mark.parametrize("host", ["both", "code"])
def test_f59_login_without_a_terminal_is_refused_once(factors: SshLab, host: str, transport: str) -> None:
    factors.logout()
    there = reach(factors, host, transport)
    with pytest.raises(LoginRefused, match="keyboard-interactive") as caught:
        there.run(["true"])
    assert "terminal" in caught.value.hint
    before = attempts(factors.servers[host])
    with pytest.raises(LoginRefused):
        there.run(["true"])
    assert attempts(factors.servers[host]) == before


@needs_pam
def test_second_factor_is_given_by_a_callback(factors: SshLab) -> None:
    there, seen = asked_by(factors, "both", [CODE])
    assert there.run(["echo", "x"]).stdout == "x\n"
    assert there.run(["echo", "y"]).stdout == "y\n"
    there.close()
    assert len(seen) == 1
    assert "Password:" in seen[0][0]
    assert not seen[0][1], "the answer must not be shown"


@needs_pam
def test_callback_may_give_the_right_code_at_the_third_question(factors: SshLab) -> None:
    there, seen = asked_by(factors, "code", ["wrong", "wrong too", CODE])
    assert there.run(["echo", "x"]).stdout == "x\n"
    there.close()
    assert len(seen) == 3


@needs_pam
def test_f59_callback_with_three_wrong_codes_ends_the_login(factors: SshLab) -> None:
    there, seen = asked_by(factors, "both", ["wrong"])
    with pytest.raises(LoginRefused, match="did not accept the password or code, 3 times"):
        there.run(["true"])
    assert len(seen) == 3
    with pytest.raises(LoginRefused):
        there.run(["true"])
    assert len(seen) == 3, "no more attempts: they lock accounts"


@needs_pam
def test_interrupted_login_restores_the_terminal(factors: SshLab) -> None:
    factors.logout()
    code = (
        "from dtslurm.transport.connect import connect\nimport os\n"
        "try: connect('both', transport='openssh').open()\n"
        "except KeyboardInterrupt: print('INTERRUPTED')\n"
        "print('MINE', os.tcgetpgrp(1) == os.getpgrp(), input('more? '), 'END')"
    )
    with Terminal(factors, code) as result:
        result.wait_until("Password:")
        result.interrupt()
        result.wait_until(r"INTERRUPTED[\s\S]*more\?")
        result.type("yes")
        result.wait_until("MINE True yes")
        result.end()


def test_unknown_host_key_is_confirmed_at_the_terminal(sshd_lab: SshLab) -> None:
    sshd_lab.server("asks", known=False)
    with at_terminal(sshd_lab, "asks") as result:
        result.wait_until(r"Are you sure you want to continue connecting")
        assert "SHA256:" in result.said
        result.type("no")
        result.wait_until("error: the host key of asks is not known on this machine")
        result.end()


@pytest.mark.parametrize("transport", REMOTE)
def test_key_with_a_passphrase_is_unlocked(sshd_lab: SshLab, transport: str, tmp_path: Path) -> None:
    if "locked" not in sshd_lab.servers:
        result = sshd_lab.server("locked", client=[f"IdentityFile {sshd_lab.root}/locked-key"])
        key = sshd_lab.root / "locked-key"
        words = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "open sesame", "-f", str(key)]
        subprocess.run(words, check=True)
        (result.folder / "authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
        with (sshd_lab.root / "authorized_keys").open("a") as file:
            file.write(key.with_suffix(".pub").read_text())
    sshd_lab.logout()
    lines = [
        line for line in sshd_lab.config.read_text().splitlines() if f"{sshd_lab.key}" != line.split()[-1]
    ]
    config = tmp_path / "config"
    config.write_text("\n".join(lines) + "\n")
    env = {**sshd_lab.environ(), "DTSLURM_SSH_CONFIG": str(config)}
    there = connect("locked", transport=transport, env=env)
    there.interactive = False  # type: ignore[attr-defined]
    with pytest.raises(LoginRefused, match="refused the login"):
        there.open()
    if transport == "paramiko":
        asked: list[str] = []

        def prompt(question: str, echo: bool) -> str:
            asked.append(question)
            return "wrong" if len(asked) == 1 else "open sesame"

        there = connect("locked", transport=transport, env=env, prompt=prompt)
        assert there.run(["echo", "x"]).stdout == "x\n"
        assert len(asked) == 2
        assert "Passphrase" in asked[0]
        there.close()


@pytest.mark.parametrize("transport", REMOTE)
def test_agent_keys_are_used_and_c12_the_agent_is_not_forwarded(
    sshd_lab: SshLab, transport: str, tmp_path: Path
) -> None:
    sshd_lab.server(f"agent-{transport}", client=["ForwardAgent yes"])
    socket = sshd_lab.root / f"agent-{transport}.sock"
    agent = subprocess.Popen([program("ssh-agent"), "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while not socket.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        env = {**sshd_lab.environ(), "SSH_AUTH_SOCK": str(socket)}
        subprocess.run([program("ssh-add"), "-q", str(sshd_lab.key)], env=env, check=True)
        drop = {str(sshd_lab.key), "IdentitiesOnly yes"}
        config = tmp_path / "config"
        text = sshd_lab.config.read_text().splitlines()
        config.write_text("\n".join(x for x in text if x.split()[-1] not in drop and x.strip() not in drop))
        env["DTSLURM_SSH_CONFIG"] = str(config)
        there = connect(f"agent-{transport}", transport=transport, env=env)
        done = there.run(["sh", "-c", 'echo "${SSH_AUTH_SOCK-none}"'])
        assert done.stdout == "none\n"
        there.close()
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()


@pytest.mark.parametrize("transport", REMOTE)
def test_invalid_ssh_configuration_is_reported(sshd_lab: SshLab, transport: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host x\n  Port many\n")
    env = {**sshd_lab.environ(), "DTSLURM_SSH_CONFIG": str(tmp_path / "config")}
    with pytest.raises((LoginRefused, HostUnavailable), match="configuration") as caught:
        connect("x", transport=transport, env=env).open()
    assert caught.value.evidence
