"""Small things that can be made anew, a file each in a folder of the user's own."""

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
    """What is kept in a folder. A broken or unwritable one costs time and nothing else."""

    folder: Path

    def get(self, name: str) -> bytes | None:
        """Return what is kept under a name, None where nothing is, or not by this user, or damaged."""
        try:
            data = read_own_file(self.folder / name)
        except OSError:
            return None
        return data[4:] if data[:4] == _sum(data[4:]) else None

    def put(self, name: str, data: bytes) -> None:
        """Keep it; what was kept long ago is made anew when it is wanted again."""
        with contextlib.suppress(OSError):
            make_own_folder(self.folder)
            write_beside(self.folder / name, _sum(data) + data)
            now = (self.folder / name).stat().st_mtime
            for old in self.folder.iterdir():
                if old.stat().st_mtime < now - _STALE_S:
                    remove(old, within=self.folder)


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")
