"""Connects this process's terminal with a session of paramiko, as the program ``ssh -t`` does."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import paramiko
from paramiko.ssh_exception import SSHException

_CHUNK = 1 << 15
_LOST = -1  # paramiko's exit status of a session that ended without one


def run_in_terminal(session: paramiko.Channel, line: str) -> int | None:
    """Run a command in a new session with a terminal; return its exit code, None if the connection was lost.

    This process's stdin has to be a terminal. It passes each key on, also Ctrl-C.

    Raises:
        SSHException, EOFError, OSError: the server gives the session no terminal, or the connection was lost.
    """
    size = shutil.get_terminal_size()
    session.get_pty(os.environ.get("TERM", "dumb"), size.columns, size.lines)
    session.exec_command(line)
    with _raw_terminal(sys.stdin.fileno()), _size_follows(session):
        _copy(session, sys.stdin.fileno(), sys.stdout.fileno())
    code = session.recv_exit_status()
    return None if code == _LOST else code


def _copy(session: paramiko.Channel, source: int, target: int) -> None:
    """Copy bytes in both directions until the session ends."""
    sources: list[paramiko.Channel | int] = [session, source]
    while True:
        ready = select.select(sources, [], [])[0]
        if session in ready:
            data = session.recv(_CHUNK)
            if not data:
                return
            while data:
                data = data[os.write(target, data) :]
        if source in ready:
            with contextlib.suppress(SSHException, EOFError, OSError):  # the session has ended
                if keys := os.read(source, _CHUNK):
                    session.sendall(keys)
                else:
                    sources.remove(source)
                    session.shutdown_write()


@contextlib.contextmanager
def _raw_terminal(terminal: int) -> Iterator[None]:
    """Pass each key on as it is, within the context."""
    settings = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


@contextlib.contextmanager
def _size_follows(session: paramiko.Channel) -> Iterator[None]:
    """Give the session the size of this process's terminal after each change, within the context."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return

    def resize(*_: object) -> None:
        size = shutil.get_terminal_size()
        with contextlib.suppress(SSHException, EOFError, OSError):
            session.resize_pty(size.columns, size.lines)

    former = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, former)
