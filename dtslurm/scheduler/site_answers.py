"""What a Slurm tells of itself: partitions, nodes, limits. They hardly change, and every submission asks."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

KEPT_S = 60.0


class AnswerCache(Protocol):
    """Keeps bytes under a name for other processes of this user, until they are made anew."""

    def get(self, name: str) -> bytes | None:
        """Return them, None if there are none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep them."""
        ...


class SiteAnswers:
    """The answers of the last minute of one Slurm: this process's, and by ``keeper`` those of others."""

    def __init__(
        self, clock: Callable[[], float], keeper: AnswerCache | None = None, place: str = ""
    ) -> None:
        """``place`` tells this Slurm, as this user sees it, from all others that share the keeper."""
        self._clock, self._keeper, self._place = clock, keeper, place
        self._known: dict[tuple[str, ...], tuple[float, str]] = {}
        self._forgotten_at = float("-inf")

    def get(self, argv: Sequence[str]) -> str | None:
        """Return what a command told in the last minute, None if it must be asked."""
        asked_at, told = self._known.get(tuple(argv)) or self._kept(argv)
        if not self.recent(asked_at) or asked_at <= self._forgotten_at:
            return None
        self._known[tuple(argv)] = asked_at, told
        return told

    def put(self, argv: Sequence[str], asked_at: float, told: str) -> None:
        """Remember what a command told."""
        self._known[tuple(argv)] = asked_at, told
        if self._keeper is not None:
            self._keeper.put(self._name(argv), f"{asked_at}\n".encode() + zlib.compress(told.encode(), 1))

    def forget(self) -> None:
        """Take nothing that was told before now."""
        self._forgotten_at = self._clock()

    def recent(self, time: float) -> bool:
        """Tell whether what was true then is as good as asking again."""
        return 0 <= self._clock() - time < KEPT_S

    def _kept(self, argv: Sequence[str]) -> tuple[float, str]:
        data = self._keeper.get(self._name(argv)) if self._keeper is not None else None
        if data is None:
            return float("-inf"), ""
        asked_at, _, told = data.partition(b"\n")
        return float(asked_at), zlib.decompress(told).decode()

    def _name(self, argv: Sequence[str]) -> str:
        words = "\0".join([self._place, *argv])
        return hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:32]
