"""Connects this process's terminal with a session of paramiko, as the program ``ssh -t`` does."""

from __future__ import annotations

import contextlib
import os
import select
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
    terminal = sys.stdin.fileno()
    with _changes_of_size() as changes:  # also while the session opens
        size = os.get_terminal_size(terminal)
        session.get_pty(os.environ.get("TERM", "dumb"), size.columns, size.lines)
        session.exec_command(line)
        with _raw_terminal(terminal):
            _copy(session, terminal, sys.stdout.fileno(), changes)
    code = session.recv_exit_status()
    return None if code == _LOST else code


def _copy(session: paramiko.Channel, source: int, target: int, changes: int) -> None:
    """Copy bytes in both directions until the session ends.

    Args:
        changes: a descriptor with a byte for each change of the terminal's size.
    """
    sources: list[paramiko.Channel | int] = [session, source, changes]
    while True:
        ready = select.select(sources, [], [])[0]
        if session in ready:
            data = session.recv(_CHUNK)
            if not data:
                return
            while data:
                data = data[os.write(target, data) :]
        with contextlib.suppress(SSHException, EOFError, OSError):  # the session has ended
            if changes in ready:
                os.read(changes, _CHUNK)
                size = os.get_terminal_size(source)
                session.resize_pty(size.columns, size.lines)
            if source in ready:
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
def _changes_of_size() -> Iterator[int]:
    """Yield a descriptor with a byte for each change of this terminal's size.

    The handler of the signal does nothing else, because it may interrupt paramiko while that holds a lock.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    is_main = threading.current_thread() is threading.main_thread()  # which alone may handle signals

    def note(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):  # enough is written
            os.write(theirs, b"x")

    former = signal.signal(signal.SIGWINCH, note) if is_main else None
    try:
        yield ours
    finally:
        if is_main:
            signal.signal(signal.SIGWINCH, former)
        os.close(ours)
        os.close(theirs)
