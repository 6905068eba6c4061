"""The interface of every transport (`Transport`, `Stream`) and the result of a command (`Completed`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dtslurm.errors import TransportError
from dtslurm.model.values import dataclass

# The caller's environment must not change what Slurm's commands do or print: SBATCH_PARTITION overrides
# #SBATCH lines, and SQUEUE_STATES hides jobs. SLURM_CONF and SLURM_CLUSTERS are kept because they select the
# cluster. PET_ (torchrun) and BASH_FUNC_ (exported shell functions) would leak from a launcher or a shell
# into the command.
SCRUBBED_PREFIXES = (
    "SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "SALLOC_", "SCANCEL_", "SLURM_", "SRUN_", "PET_", "BASH_FUNC_",
)  # fmt: skip
SCRUBBED = frozenset(
    {
        "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
        "LD_PRELOAD", "BASH_ENV", "CUDA_VISIBLE_DEVICES",
    }
)  # fmt: skip
KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"})

# With these variables Slurm's commands print epoch seconds, complete array expressions and English.
QUERY_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

TAIL_LINES = 20
CONNECT_S = 10.0  # for a TCP connection from the host to another host


@dataclass(frozen=True)
class Completed:
    """A finished command: its argv, exit code and both outputs.

    ``stdout`` and ``stderr`` are text with undecodable bytes surrogate-escaped; ``raw`` is stdout as bytes.
    The exit code of a command that signal S ended is -S on this machine, and 128 + S on a login node, where a
    shell reports it.
    """

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    raw: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the command exited with 0."""
        return self.code == 0


class CommandFailed(TransportError):
    """The command of a stream ended with a non-zero exit code.

    Attributes:
        code: the exit code, as in `Completed`.
    """

    def __init__(self, program: str, code: int, evidence: Sequence[str]) -> None:
        super().__init__(f"{program} ended with exit code {code}", evidence=evidence)
        self.code = code


class Stream(Iterator[bytes], Protocol):
    """A running command: an iterator over its stdout in chunks, with access to its stdin.

    A command that ends by itself with a non-zero exit code raises `CommandFailed` after its last chunk.
    """

    @property
    def ended(self) -> bool:
        """Whether the command has ended and every chunk was read."""
        ...

    def read(self, timeout: float) -> bytes:
        """Return the next chunk; ``b""`` if none arrived within ``timeout`` seconds or the command has ended.

        Raises:
            TransportError: the command failed, or the connection was lost.
        """
        ...

    def read_stderr(self) -> bytes:
        """Return what `read` has received of stderr since the last call; at most the last 64 KiB."""
        ...

    def send(self, data: bytes) -> None:
        """Write to the command's stdin.

        Raises:
            TransportError: the command no longer reads its stdin.
        """
        ...

    def close_stdin(self) -> None:
        """Close the command's stdin."""
        ...


class TcpConnection(Protocol):
    """A TCP connection, with the methods of a socket."""

    def recv(self, nbytes: int, /) -> bytes:
        """Return up to ``nbytes`` bytes, ``b""`` at the end; see `socket.socket.recv`.

        Raises:
            OSError: the connection was lost.
        """
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all bytes; see `socket.socket.sendall`.

        Raises:
            OSError: the connection was lost.
        """
        ...

    def settimeout(self, value: float | None, /) -> None:
        """Set the time limit of each method in seconds; None for no limit."""
        ...

    def shutdown(self, how: int, /) -> None:
        """Close the connection for sending, receiving or both; see `socket.socket.shutdown`."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Transport(Protocol):
    """A way to run commands and move bytes on one host."""

    @property
    def name(self) -> str:
        """The name of the transport: ``local``, ``openssh`` or ``paramiko``."""
        ...

    @property
    def host(self) -> str:
        """The host's name for messages to the user."""
        ...

    @property
    def local(self) -> bool:
        """Whether the host is this machine."""
        ...

    def open(self) -> None:
        """Connect, and log in if necessary. The other methods connect by themselves.

        Raises:
            HostUnavailable, LoginRefused: the connection failed.
        """
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run ``argv`` with a scrubbed environment plus ``env``; return its result, whatever the exit code.

        ``stdin`` may be an iterable of chunks, which are consumed as the command reads them; if it is empty,
        the command's stdin is closed. A command whose connection is lost while stdin is sent sees the end of
        its input, so use `put` for content that must arrive complete or not at all.

        Raises:
            CommandNotFound: there is no such program.
            CommandTimeout: the command did not end within ``timeout`` seconds and was killed; its effect is
                unknown.
            HostUnavailable: there is no connection; the command was not started.
            TransportError: the connection was lost; the command's effect is unknown.
        """
        ...

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Stream]:
        """Run ``argv``; its stdin stays open after ``stdin``. Leaving the context ends the command.

        Raises:
            CommandNotFound, HostUnavailable, TransportError: as in `run`, at this call or at the first chunk.
        """
        ...

    def connect_tcp(self, address: str, port: int) -> TcpConnection:
        """Connect from the host to a port of another host; no port of the host is opened for that.

        With OpenSSH, a connection that the host cannot make ends without a byte.

        Raises:
            TransportError: there is no login, or the connection could not be made.
        """
        ...

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically (temporary file, fsync, rename); create missing folders with mode 0700.

        Raises:
            StoreError: the file cannot be written.
        """
        ...

    def get(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            StoreError: the file cannot be read.
        """
        ...

    def close(self) -> None:
        """Release the transport's resources."""
        ...


def text(data: bytes) -> str:
    """Decode an output, with undecodable bytes surrogate-escaped."""
    return data.decode("utf-8", "surrogateescape")


def tail(data: bytes) -> list[str]:
    """Return the last `TAIL_LINES` lines of an output, for an error's evidence."""
    return text(data).splitlines()[-TAIL_LINES:]
