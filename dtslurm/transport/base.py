"""What every transport offers: five verbs and a result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dtslurm.model.values import dataclass

# A caller's own settings must not bend what Slurm's commands do or print (SBATCH_PARTITION beats
# #SBATCH lines, SQUEUE_STATES hides jobs); SLURM_CONF and SLURM_CLUSTERS say which Slurm is meant.
# The last two are what a launcher or a shell left behind: inside a job, or under torchrun, they would leak.
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

# Slurm's commands print epoch seconds and whole array expressions, in English.
QUERY_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

TAIL_LINES = 20


@dataclass(frozen=True)
class Completed:
    """A finished command: its argv, exit code and both outputs.

    ``stdout`` and ``stderr`` are text, undecodable bytes surrogate-escaped; ``raw`` is stdout as it came.
    A command ended by signal S has the code -S here, and 128 + S far away, where a shell reports it.
    """

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    raw: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.code == 0


class Stream(Iterator[bytes], Protocol):
    """A running command: iterate over its stdout in chunks as they come, talk to its stdin.

    A command that ends by itself with another code than 0 raises ``TransportError`` after its last chunk.
    """

    @property
    def ended(self) -> bool:
        """Whether the command has ended and every chunk was taken."""
        ...

    def read(self, timeout: float) -> bytes:
        """Return the next chunk, or nothing if none came within ``timeout`` seconds or the command has ended.

        Raises:
            TransportError: the command failed, or the link was cut.
        """
        ...

    def send(self, data: bytes) -> None:
        """Write to the command's stdin.

        Raises:
            TransportError: it reads no more.
        """
        ...

    def close_stdin(self) -> None:
        """Tell the command that nothing more will come."""
        ...


class Transport(Protocol):
    """A way to run commands and move bytes on one host."""

    @property
    def name(self) -> str:
        """Which transport it is: ``local``, ``openssh`` or ``paramiko``."""
        ...

    @property
    def host(self) -> str:
        """The host in words for people."""
        ...

    @property
    def local(self) -> bool:
        """Whether the host is this machine."""
        ...

    def open(self) -> None:
        """Make the link, logging in where that is needed; every other verb does so by itself.

        Raises:
            HostUnavailable, LoginRefused: there is no link.
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
        """Run ``argv`` with a scrubbed environment plus ``env``; return whatever its exit code is.

        ``stdin`` may come in chunks, which are taken as the command reads them; without any, stdin is
        closed. A link that is cut while stdin travels looks to the command like the end of its input: what
        must arrive whole or not at all is sent by `put`.

        Raises:
            CommandNotFound: there is no such program.
            CommandTimeout: it did not end within ``timeout`` seconds and was killed; what it did is unknown.
            HostUnavailable: there is no link; the command was not started.
            TransportError: the link was cut; what the command did is unknown.
        """
        ...

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Stream]:
        """Run ``argv``; its stdin stays open after ``stdin``. Leaving the context ends the command.

        Raises:
            CommandNotFound, HostUnavailable, TransportError: as `run`, here or at the first chunk.
        """
        ...

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically (temp file, fsync, rename); missing folders are made 0700.

        Raises:
            StoreError: the disk refused.
        """
        ...

    def get(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            StoreError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


def text(data: bytes) -> str:
    """Return output as text, undecodable bytes surrogate-escaped."""
    return data.decode("utf-8", "surrogateescape")


def tail(data: bytes) -> list[str]:
    """Return the last lines of an output, as evidence."""
    return text(data).splitlines()[-TAIL_LINES:]
