"""Programs that use this terminal, through every transport."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from tests.sshd.servers import SshLab
from tests.transport.linking import server
from tests.waiting import busyness

RUN = """
import sys
from dtslurm.errors import DtslurmError
from dtslurm.transport.connect import connect
from dtslurm.transport.interactive import run_interactive

transport = connect(sys.argv[1] or None, transport=sys.argv[2])
try:
    sys.exit(run_interactive(transport, ["sh", "-c", sys.argv[3]]))
except DtslurmError as error:
    sys.exit(f"error: {error}")
finally:
    transport.close()
"""


class Terminal:
    """A terminal in which a program runs."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(100, 30)
        self.settings = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - in this one thread
        )  # fmt: skip
        self._theirs, self.text = theirs, ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 60 * busyness()
        while text not in self.text:
            assert time.monotonic() < end, self.text
            self.read(1.0)

    def read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            self.text += os.read(self._ours, 4096).decode()

    def end(self) -> int:
        """Wait for the program; return its exit code."""
        end = time.monotonic() + 60 * busyness()
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)
        self.read(0)
        return self.process.wait(1)

    def current_settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


class Opener:
    """Opens terminals in which a command runs through a transport."""

    def __init__(self, host: str, transport: str, env: dict[str, str], stack: contextlib.ExitStack) -> None:
        self.host, self._env, self._stack = host, env, stack
        self._words = [sys.executable, "-c", RUN, host, transport]

    def __call__(self, command: str) -> Terminal:
        terminal = Terminal([*self._words, command], self._env)
        self._stack.callback(terminal.close)
        return terminal


@pytest.fixture(params=["local", "openssh", "paramiko"])
def run(request: pytest.FixtureRequest) -> Iterator[Opener]:
    own = {"TERM": "vt220", "COLUMNS": "10", "LINES": "10"}  # the size is that of the terminal itself
    env = {**os.environ, **own}
    host = ""
    if request.param != "local":
        lab: SshLab = request.getfixturevalue("login")
        env, host = {**lab.environ(), **own}, "login"
    with contextlib.ExitStack() as stack:
        yield Opener(host, request.param, env, stack)


@pytest.fixture
def by_paramiko(login: SshLab) -> Iterator[Callable[[str, str], Terminal]]:
    """Open a terminal on a host with paramiko."""
    with contextlib.ExitStack() as stack:
        env = {**login.environ(), "TERM": "vt220"}
        yield lambda host, command: Opener(host, "paramiko", env, stack)(command)


def test_program_has_a_terminal_of_this_size_and_its_exit_code_is_returned(run: Opener) -> None:
    terminal = run('test -t 0 && test -t 1 && echo "$TERM $(stty size)"; exit 7')
    assert terminal.end() == 7
    assert "vt220 30 100" in terminal.text


def test_keys_arrive_and_an_interrupt_ends_only_the_program_there(run: Opener) -> None:
    terminal = run(
        'trap "echo interrupted; end=1" INT; echo began; read line; echo "got $line";'
        'until [ -n "$end" ]; do sleep 0.1; done; exit 5'
    )
    terminal.wait_for("began")
    terminal.type("a line\r")
    terminal.wait_for("got a line")
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert terminal.end() == 5


def test_size_follows_this_terminal_whose_settings_come_back(run: Opener) -> None:
    terminal = run(
        "echo began; until [ \"$(stty size)\" = '20 70' ]; do sleep 0.1; done; stty raw; echo resized"
    )
    terminal.wait_for("began")
    terminal.resize(70, 20)
    terminal.wait_for("resized")
    assert terminal.end() == 0
    if run.host:  # a program here changes the settings of this terminal itself
        assert terminal.current_settings() == terminal.settings


def test_lost_connection_ends_with_an_error_and_the_settings_come_back(
    login: SshLab, by_paramiko: Callable[[str, str], Terminal]
) -> None:
    server(login, "leaves")
    terminal = by_paramiko("leaves", "echo began; read line; kill -9 $PPID; sleep 100")
    terminal.wait_for("began")
    terminal.type("\r")
    assert terminal.end() == 1
    assert "error: the connection to leaves was lost" in terminal.text
    assert terminal.current_settings() == terminal.settings


def test_server_that_gives_no_terminal_is_named(
    login: SshLab, by_paramiko: Callable[[str, str], Terminal]
) -> None:
    server(login, "plain", lines=["PermitTTY no"])
    terminal = by_paramiko("plain", "echo began")
    assert terminal.end() == 1
    assert "error: plain opens no terminal" in terminal.text
