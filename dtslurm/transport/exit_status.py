"""What the end of a far command means: its own exit code, or that it did not start or was ended."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.errors import CommandNotFound, CommandTimeout, TransportError
from dtslurm.transport.base import Completed, tail, text
from dtslurm.transport.remote_command import CallOutputs

MOST_OUTPUT = 1 << 26  # bytes; a command that prints more is read with `stream`

_NOT_STARTED = b"timeout: failed to run command"


def check_size(host: str, program: str, size: int) -> None:
    """Raise ``TransportError`` if a command has printed more than anybody can mean to keep in memory."""
    if size > MOST_OUTPUT:
        raise TransportError(f"{program} on {host} printed more than {MOST_OUTPUT >> 20} MiB")


def completed(host: str, answer: CallOutputs, argv: Sequence[str], out: bytes, err: bytes) -> Completed:
    """Return what a command that has ended did.

    Raises:
        CommandTimeout: the far side ended it because this side was asleep when its time was up.
        CommandNotFound, TransportError: as `check_start`.
    """
    code, flag = answer.verdict()
    if flag == "t":
        raise CommandTimeout(
            f"{argv[0]} on {host} did not end in time and was killed there; what it did is unknown",
            evidence=tail(err),
        )
    check_start(host, argv[0], code, flag, err)
    return Completed(tuple(argv), code, text(out), text(err), out)


def check_start(host: str, program: str, code: int, flag: str, err: bytes) -> None:
    """Raise ``CommandNotFound`` or ``TransportError`` if the program did not start."""
    if flag == "x":
        raise CommandNotFound(f"{program} cannot be executed on {host}", evidence=tail(err))
    if flag == "m":
        raise CommandNotFound(f"there is no program {program} on {host}", evidence=tail(err))
    if code == 127 and err.startswith(_NOT_STARTED):  # there, but not what its first line names
        raise CommandNotFound(f"there is no program {program} on {host}", evidence=tail(err))
    if code == 126 and (err.startswith(_NOT_STARTED) or err.endswith(b": Argument list too long\n")):
        raise TransportError(f"{program} could not be started on {host}", evidence=tail(err))
