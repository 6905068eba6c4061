"""Programs that use this terminal, through every transport."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dtslurm.transport.ssh.terminal import run_in_terminal
from tests.sshd.servers import SshLab
from tests.transport.linking import server
from tests.waiting import busyness, wait_until

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

    def resize(self, columns: int, lines: int) -> int:
        """Resize the terminal; return the number of its columns."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        return columns

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        end = time.monotonic() + 60 * busyness()
        while text not in self.text:
            assert time.monotonic() < end, self.text
            meanwhile()
            self.read(1.0)

    def wait_until_raw(self) -> None:
        """Wait until keys that interrupt are passed on: ssh shows output before it has set this terminal."""
        wait_until(lambda: not termios.tcgetattr(self._theirs)[3] & termios.ISIG)

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
    if run.host:
        terminal.wait_until_raw()
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
    # A program ssh that uses an open connection shows output before it notes changes of the size.
    terminal.wait_for("resized", meanwhile=lambda: [terminal.resize(columns, 20) for columns in (71, 70)])
    assert terminal.end() == 0
    if run.host:  # a program here changes the settings of this terminal itself
        assert terminal.current_settings() == terminal.settings


def test_lost_connection_ends_with_an_error_and_the_settings_come_back(
    login: SshLab, by_paramiko: Callable[[str, str], Terminal]
) -> None:
    server(login, "leaves")
    terminal = by_paramiko("leaves", "echo began; read line; kill -9 $PPID; sleep 100")
    terminal.wait_for("began")
    terminal.wait_until_raw()
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


class Session:
    """A session of paramiko that has no more output, and whose terminal is resized while it opens."""

    def __init__(self, resize: Callable[[], object]) -> None:
        self._resize = resize
        self._socket, self._other = socket.socketpair()
        self.sizes: list[tuple[int, int]] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def get_pty(self, term: str, width: int, height: int) -> None:
        self.sizes.append((width, height))
        self._resize()

    def exec_command(self, line: str) -> None:
        """Accept any command."""

    def resize_pty(self, width: int, height: int) -> None:
        self.sizes.append((width, height))
        self._other.close()

    def recv(self, size: int) -> bytes:
        return self._socket.recv(size)

    def recv_exit_status(self) -> int:
        return 0

    def close(self) -> None:
        self._socket.close()
        self._other.close()


def test_size_that_changes_while_the_session_opens_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()

    def resize(columns: int) -> None:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        os.kill(os.getpid(), signal.SIGWINCH)  # as the kernel does for the program at the terminal

    resize(100)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: theirs))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: theirs))
    session = Session(lambda: resize(70))
    ending = threading.Timer(60, session._other.close)  # so that a missed change fails and does not hang
    ending.start()
    try:
        assert run_in_terminal(session, "true") == 0  # type: ignore[arg-type]
    finally:
        ending.cancel()
        session.close()
        os.close(ours)
        os.close(theirs)
    assert session.sizes == [(100, 30), (70, 30)]
