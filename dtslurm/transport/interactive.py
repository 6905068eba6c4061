"""Runs a program that uses this process's terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound
from dtslurm.transport.base import Transport
from dtslurm.transport.ssh.openssh import OpenSSHTransport


def run_interactive(transport: Transport, argv: Sequence[str], *, folder: str | None = None) -> int:
    """Run ``argv`` on the transport's host, attached to this process's terminal; return its exit code.

    Args:
        folder: the working directory on this machine.

    Raises:
        CommandNotFound: there is no such program on this machine.
        HostUnavailable, LoginRefused, TransportError: the connection failed, or the host opens no terminal.
    """
    if transport.name == "paramiko":
        from dtslurm.transport.ssh.paramiko_ssh import ParamikoTransport

        if isinstance(transport, ParamikoTransport):
            return transport.run_in_terminal(argv)
    command = transport.terminal_argv(argv) if isinstance(transport, OpenSSHTransport) else list(argv)
    working_dir = folder if folder is not None and Path(folder).is_dir() else None
    try:
        with _ctrl_c_is_for_the_program():
            return subprocess.run(command, cwd=working_dir, env=dict(os.environ), check=False).returncode
    except (FileNotFoundError, PermissionError) as error:
        raise CommandNotFound(f"cannot run {command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def _ctrl_c_is_for_the_program() -> Iterator[None]:
    """Let Ctrl-C reach only the program at the terminal, within the context."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    former = signal.signal(signal.SIGINT, lambda *_: None)  # a program does not inherit a function
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
