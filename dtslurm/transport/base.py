"""What every transport offers: five verbs and a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

# A caller's own settings must not bend what Slurm's commands do or print (SBATCH_PARTITION beats
# #SBATCH lines, SQUEUE_STATES hides jobs); SLURM_CONF and SLURM_CLUSTERS say which Slurm is meant.
SCRUBBED_PREFIXES = ("SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "SALLOC_", "SCANCEL_", "SLURM_", "SRUN_")
KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"})

# Slurm's commands print epoch seconds and whole array expressions, in English.
QUERY_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


@dataclass(frozen=True)
class Completed:
    """A finished command: its argv, exit code and both outputs (undecodable bytes surrogate-escaped)."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.code == 0


class Transport(Protocol):
    """A way to run commands and move bytes on one host."""

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run ``argv`` with a scrubbed environment plus ``env``; return whatever its exit code is.

        Raises:
            CommandNotFound: there is no such program.
            CommandTimeout: it did not end within ``timeout`` seconds and was killed.
            TransportError: the link failed.
        """
        ...

    def stream(self, argv: Sequence[str]) -> AbstractContextManager[Iterator[bytes]]:
        """Run ``argv`` and yield its stdout in chunks as they come; leaving the context ends it."""
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
