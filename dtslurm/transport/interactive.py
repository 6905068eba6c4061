"""Runs a program that uses this process's terminal."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound, RequestInvalid
from dtslurm.transport.base import Transport
from dtslurm.transport.ssh.openssh import OpenSSHTransport


def run_interactive(transport: Transport, argv: Sequence[str], *, folder: str | None = None) -> int:
    """Run ``argv`` on the transport's host, attached to this process's terminal; return its exit code.

    Args:
        folder: the working directory on this machine.

    Raises:
        CommandNotFound: there is no such program on this machine.
        RequestInvalid: this transport cannot forward a terminal.
        HostUnavailable, LoginRefused: the connection failed.
    """
    command = list(argv)
    if not transport.local:
        if not isinstance(transport, OpenSSHTransport):
            raise RequestInvalid(
                [
                    (
                        f"transport {transport.name}, which connects to {transport.host}, does not support a "
                        "terminal"
                    )
                ],
                hint=f"if ssh is installed, run: ssh -t HOST {shlex.join(command)}",
            )
        command = transport.terminal_argv(command)
    working_dir = folder if folder is not None and Path(folder).is_dir() else None
    try:
        return subprocess.run(command, cwd=working_dir, env=dict(os.environ), check=False).returncode
    except (FileNotFoundError, PermissionError) as error:
        raise CommandNotFound(f"cannot run {command[0]}: {error.strerror}") from error
