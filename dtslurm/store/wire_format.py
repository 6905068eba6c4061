"""The bytes that carry a run to the far side: its request, then the contents that are not there yet."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtslurm.errors import StoreError
from dtslurm.model.values import dataclass
from dtslurm.store.snapshot import DIGEST_LENGTH, Snapshot, SnapshotFile
from dtslurm.transport.disk import store_error

_PART = 1 << 18
_SAMPLE = 1 << 13
_WORTH_IT = 0.75  # packed to raw size of the first bytes; what is packed already is not packed again


@dataclass(frozen=True)
class Delivery:
    """A run to be placed.

    Attributes:
        run_dir: absolute folder of the run on the cluster; it must not exist yet.
        objects: absolute folder on the cluster where file contents are kept by their digests.
        files: the run's own small files by their names below ``run_dir``, such as ``job.json``; made 0600.
        snapshot: the code to lay out below ``code/``, None for a run without.
    """

    run_dir: str
    objects: str
    files: Mapping[str, bytes]
    snapshot: Snapshot | None = None

    def contents(self) -> dict[str, SnapshotFile]:
        """Return the files of the snapshot by the names of their contents: one of each."""
        files = self.snapshot.files if self.snapshot else ()
        return {one.key: one for one in files if one.target is None}


def objects_folder(run_root: str) -> str:
    """Return where the contents of a run root's snapshots lie: beside the runs, which link to them."""
    return f"{run_root}/.objects"


def request(
    parcel: Delivery, then: Sequence[str], limit: float, event: Mapping[str, object]
) -> dict[str, Any]:
    """Return what the far side is asked to do; see `dtslurm.worker.delivery.server`."""
    snapshot = parcel.snapshot
    tree = None
    if snapshot:
        tree = [
            [one.path, None, one.target] if one.target is not None else [one.path, one.key, one.size]
            for one in snapshot.files
        ]
    return {
        "run_dir": parcel.run_dir,
        "objects": parcel.objects,
        "inside": snapshot.inside if snapshot else "",
        "spare": _spare(snapshot) if snapshot else None,
        "files": [[name, 0o600, data.decode("latin-1")] for name, data in parcel.files.items()],
        "tree": tree,
        "then": list(then),
        "limit": limit,
        "event": dict(event),
    }


def _spare(snapshot: Snapshot) -> str:
    """Return what to call a tree made ahead: the next one of the same folder will be much like it."""
    place = f"{os.uname().nodename}\0{snapshot.root}"
    return hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def packed_request(asked: Mapping[str, Any]) -> bytes:
    """Return a request as it travels."""
    data = zlib.compress(json.dumps(asked, separators=(",", ":")).encode("ascii"), 1)  # digests pack badly
    return struct.pack(">I", len(data)) + data


def blobs(root: Path, files: Collection[SnapshotFile]) -> Iterator[tuple[bytes, int]]:
    """Yield the contents of files as they travel, and how many bytes of them each part stands for.

    Raises:
        StoreError: a file cannot be read, or is not what it was when the snapshot was taken.
    """
    for one in files:
        yield from _blob(root, one)
    yield b".", 0


def _blob(root: Path, one: SnapshotFile) -> Iterator[tuple[bytes, int]]:
    parts = content(root, one)
    first = next(parts, b"")
    packs = len(zlib.compress(first[:_SAMPLE], 1)) < _WORTH_IT * len(first[:_SAMPLE])
    pack = zlib.compressobj(1)
    key = one.key.encode()
    yield (b"z" if packs else b"r") + bytes([len(key)]) + key, 0
    part = first
    while part:
        sent = pack.compress(part) if packs else part
        if sent:
            yield struct.pack(">I", len(sent)) + sent, len(part)
        else:
            yield b"", len(part)
        part = next(parts, b"")
    rest = pack.flush() if packs else b""
    if rest:
        yield struct.pack(">I", len(rest)) + rest, 0
    yield struct.pack(">I", 0), 0


def content(root: Path, one: SnapshotFile) -> Iterator[bytes]:
    """Yield a file's content, and see that it is still what the snapshot says.

    Raises:
        StoreError: it cannot be read, or has changed.
    """
    path = root / one.path
    digest, size = hashlib.sha256(), 0
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as file:
            while part := file.read(_PART):
                digest.update(part)
                size += len(part)
                yield part
    except FileNotFoundError:
        raise _changed(path, "is gone") from None
    except OSError as error:
        raise store_error(error, path, "read") from error
    if size != one.size or digest.hexdigest()[:DIGEST_LENGTH] != one.digest:
        raise _changed(path, "was changed")


def _changed(path: Path, how: str) -> StoreError:
    return StoreError(
        f"{path} {how} while the run was being submitted; nothing was queued",
        hint="submit again; if something writes it all the time, exclude it from the snapshot",
    )
