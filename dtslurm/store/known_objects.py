"""Remembers which contents a cluster has, so that a second submission sends what changed without asking."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection
from pathlib import Path

from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.store.hash_cache import write_beside

_FIRST = "dtslurm objects 1"


class KnownObjects:
    """The names of contents that lay in one objects folder when it was last written to.

    Only a guess: the far side says what it lacks. ``path`` None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._loaded: frozenset[str] | None = None

    @classmethod
    def of(cls, cache: Path, cluster: str, objects: str) -> KnownObjects:
        """Return what is remembered of a cluster's objects folder in the user's cache folder."""
        name = hashlib.sha256(f"{cluster}\0{objects}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return cls(cache / f"objects-{name}.txt")

    def load(self) -> frozenset[str]:
        """Return the names; empty if nothing is remembered."""
        self._loaded = self._read()
        return self._loaded

    def _read(self) -> frozenset[str]:
        if self._path is None:
            return frozenset()
        try:
            first, *keys = read_own_file(self._path).decode("ascii").splitlines()
        except (OSError, ValueError):
            return frozenset()
        return frozenset(keys) if first == _FIRST else frozenset()

    def save(self, keys: Collection[str]) -> None:
        """Remember these names in place of the earlier ones: what later snapshots of the tree share."""
        if self._path is None or keys == (self.load() if self._loaded is None else self._loaded):
            return
        self._loaded = frozenset(keys)
        text = "\n".join([_FIRST, *keys])
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            write_beside(self._path, text.encode("ascii"))
