"""A cache of small blobs that can be recomputed: one file each in a folder of the user."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.model.values import dataclass
from dtslurm.store.hash_cache import write_beside
from dtslurm.transport.deletion import remove

_STALE_S = 90 * 86400


@dataclass(frozen=True)
class BlobCache:
    """The blobs in a folder. A damaged or unwritable cache costs only time."""

    folder: Path

    def get(self, name: str) -> bytes | None:
        """Return the blob of a name; None if it is missing, damaged, or owned by another user."""
        try:
            data = read_own_file(self.folder / name)
        except OSError:
            return None
        return data[4:] if data[:4] == _checksum(data[4:]) else None

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, and remove all blobs that are older than 90 days."""
        with contextlib.suppress(OSError):
            make_own_folder(self.folder)
            write_beside(self.folder / name, _checksum(data) + data)
            now = (self.folder / name).stat().st_mtime
            for stale_path in self.folder.iterdir():
                if stale_path.stat().st_mtime < now - _STALE_S:
                    remove(stale_path, within=self.folder)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")
