"""A cache of the cluster's partitions, nodes and limits, which rarely change but every submission needs."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

KEPT_S = 60.0  # seconds for which an answer is valid


class AnswerCache(Protocol):
    """A cache of bytes by name that other processes of this user share."""

    def get(self, name: str) -> bytes | None:
        """Return the cached bytes of ``name``, or None if there are none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under ``name``."""
        ...


class SiteAnswers:
    """The answers of one Slurm installation during the last minute.

    They come from this process and, through ``shared_cache``, from other processes.
    """

    def __init__(
        self, clock: Callable[[], float], shared_cache: AnswerCache | None = None, scope: str = ""
    ) -> None:
        """Create an empty cache.

        Args:
            clock: returns the current time in seconds since the epoch.
            shared_cache: the cache shared with other processes, if any.
            scope: identifies this Slurm installation and user among all that share ``shared_cache``.
        """
        self._clock, self._shared_cache, self._scope = clock, shared_cache, scope
        self._answers: dict[tuple[str, ...], tuple[float, str]] = {}
        self._invalid_before = float("-inf")

    def get(self, argv: Sequence[str]) -> str | None:
        """Return a command's output of the last minute, or None if the command must be run."""
        run_at, output = self._answers.get(tuple(argv)) or self._load_shared(argv)
        if not self.recent(run_at) or run_at <= self._invalid_before:
            return None
        self._answers[tuple(argv)] = run_at, output
        return output

    def put(self, argv: Sequence[str], asked_at: float, output: str) -> None:
        """Store the output of a command that was run at ``asked_at``."""
        self._answers[tuple(argv)] = asked_at, output
        if self._shared_cache is not None:
            self._shared_cache.put(
                self._cache_key(argv), f"{asked_at}\n".encode() + zlib.compress(output.encode(), 1)
            )

    def forget(self) -> None:
        """Ignore all answers from before this call."""
        self._invalid_before = self._clock()

    def recent(self, time: float) -> bool:
        """Return whether an answer of this time is still valid."""
        return 0 <= self._clock() - time < KEPT_S

    def _load_shared(self, argv: Sequence[str]) -> tuple[float, str]:
        data = self._shared_cache.get(self._cache_key(argv)) if self._shared_cache is not None else None
        if data is None:
            return float("-inf"), ""
        run_at, _, compressed_output = data.partition(b"\n")
        return float(run_at), zlib.decompress(compressed_output).decode()

    def _cache_key(self, argv: Sequence[str]) -> str:
        key_text = "\0".join([self._scope, *argv])
        return hashlib.sha256(key_text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
