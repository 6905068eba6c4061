"""Interpretation of a remote command's end: its own exit code, a failed start, or a time-out."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.errors import CommandNotFound, CommandTimeout, TransportError
from dtslurm.transport.base import Completed, tail, text
from dtslurm.transport.remote_command import CallOutputs

MOST_OUTPUT = 1 << 26  # bytes; read larger outputs with `stream`

_NOT_STARTED = b"timeout: failed to run command"


def check_size(host: str, program: str, size: int) -> None:
    """Raise ``TransportError`` if a command printed more than `MOST_OUTPUT` bytes."""
    if size > MOST_OUTPUT:
        raise TransportError(f"{program} on {host} printed more than {MOST_OUTPUT >> 20} MiB")


def completed(host: str, answer: CallOutputs, argv: Sequence[str], stdout: bytes, stderr: bytes) -> Completed:
    """Return the result of a remote command that has ended.

    Raises:
        CommandTimeout: the login node killed the command, because this machine was suspended at the deadline.
        CommandNotFound, TransportError: as in `check_start`.
    """
    code, flag = answer.verdict()
    if flag == "t":
        raise CommandTimeout(
            f"{argv[0]} on {host} did not end in time and was killed; its effects are unknown",
            evidence=tail(stderr),
        )
    check_start(host, argv[0], code, flag, stderr)
    return Completed(tuple(argv), code, text(stdout), text(stderr), stdout)


def check_start(host: str, program: str, code: int, flag: str, err: bytes) -> None:
    """Raise ``CommandNotFound`` or ``TransportError`` if the program did not start."""
    if flag == "x":
        raise CommandNotFound(f"{program} cannot be executed on {host}", evidence=tail(err))
    if flag == "m":
        raise CommandNotFound(f"{host} has no program {program}", evidence=tail(err))
    if code == 127 and err.startswith(_NOT_STARTED):  # the interpreter of the script is missing
        raise CommandNotFound(f"{host} has no program {program}", evidence=tail(err))
    if code == 126 and (err.startswith(_NOT_STARTED) or err.endswith(b": Argument list too long\n")):
        raise TransportError(f"{program} could not be started on {host}", evidence=tail(err))
