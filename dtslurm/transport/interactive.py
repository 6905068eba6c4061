"""A program with the terminal to itself."""

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
    """Run ``argv`` where ``transport`` reaches, with this process's terminal; return its exit code.

    Args:
        folder: where to run it on this machine.

    Raises:
        CommandNotFound: there is no such program on this machine.
        RequestInvalid: this transport carries no terminal.
        HostUnavailable, LoginRefused: there is no link.
    """
    words = list(argv)
    if not transport.local:
        if not isinstance(transport, OpenSSHTransport):
            raise RequestInvalid(
                [f"{transport.host} is reached by {transport.name}, which carries no terminal"],
                hint=f"with ssh installed: ssh -t HOST {shlex.join(words)}",
            )
        words = transport.terminal_argv(words)
    place = folder if folder is not None and Path(folder).is_dir() else None
    try:
        return subprocess.run(words, cwd=place, env=dict(os.environ), check=False).returncode
    except (FileNotFoundError, PermissionError) as error:
        raise CommandNotFound(f"cannot run {words[0]}: {error.strerror}") from error
