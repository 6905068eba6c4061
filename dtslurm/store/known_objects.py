"""A cache of the contents that a cluster has, so that a resubmission sends only changes, without a query."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection
from pathlib import Path

from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.store.hash_cache import write_beside

_HEADER = "dtslurm objects 1"


class KnownObjects:
    """The keys of contents that an objects folder had when it was last written to.

    This is only a guess: the worker reports the missing contents. With ``path`` None nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._loaded: frozenset[str] | None = None

    @classmethod
    def of(cls, cache: Path, cluster: str, objects: str) -> KnownObjects:
        """Return the entry for a cluster's objects folder in the user's cache folder."""
        name = hashlib.sha256(f"{cluster}\0{objects}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return cls(cache / f"objects-{name}.txt")

    def load(self) -> frozenset[str]:
        """Return the keys; empty if none are stored."""
        self._loaded = self._read()
        return self._loaded

    def _read(self) -> frozenset[str]:
        if self._path is None:
            return frozenset()
        try:
            header, *keys = read_own_file(self._path).decode("ascii").splitlines()
        except (OSError, ValueError):
            return frozenset()
        return frozenset(keys) if header == _HEADER else frozenset()

    def save(self, keys: Collection[str]) -> None:
        """Replace the stored keys with those of the latest snapshot."""
        if self._path is None or keys == (self.load() if self._loaded is None else self._loaded):
            return
        self._loaded = frozenset(keys)
        text = "\n".join([_HEADER, *keys])
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            write_beside(self._path, text.encode("ascii"))
