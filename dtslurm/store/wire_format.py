"""The byte stream that delivers a run: the request, then the file contents missing on the login node."""

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

_CHUNK = 1 << 18
_SAMPLE_BYTES = 1 << 13
_MAX_RATIO = 0.75  # compressed to raw size of the sample; other content is sent uncompressed


@dataclass(frozen=True)
class Delivery:
    """A run to be installed on the cluster.

    Attributes:
        run_dir: absolute path of the run directory on the cluster; it must not exist yet.
        objects: absolute path of the folder on the cluster that stores file contents by digest.
        files: the run's own small files by their names below ``run_dir``, such as ``job.json``; created with
            mode 0600.
        snapshot: the code to materialize below ``code/``, None for a run without code.
    """

    run_dir: str
    objects: str
    files: Mapping[str, bytes]
    snapshot: Snapshot | None = None

    def contents(self) -> dict[str, SnapshotFile]:
        """Return the snapshot's regular files by content key, one file per content."""
        files = self.snapshot.files if self.snapshot else ()
        return {file.key: file for file in files if file.target is None}


def objects_folder(run_root: str) -> str:
    """Return the folder of a run root for the snapshots' contents, which the runs' files link to."""
    return f"{run_root}/.objects"


def request(
    delivery: Delivery, command: Sequence[str], limit: float, event: Mapping[str, object]
) -> dict[str, Any]:
    """Return the request for the worker; see `dtslurm.worker.delivery.server`."""
    snapshot = delivery.snapshot
    tree = None
    if snapshot:
        tree = [
            [file.path, None, file.target] if file.target is not None else [file.path, file.key, file.size]
            for file in snapshot.files
        ]
    return {
        "run_dir": delivery.run_dir,
        "objects": delivery.objects,
        "inside": snapshot.inside if snapshot else "",
        "spare": _prebuilt_tree_name(snapshot) if snapshot else None,
        "files": [[name, 0o600, data.decode("latin-1")] for name, data in delivery.files.items()],
        "tree": tree,
        "then": list(command),
        "limit": limit,
        "event": dict(event),
    }


def _prebuilt_tree_name(snapshot: Snapshot) -> str:
    """Return the name of the prebuilt tree, the same for all runs from this folder."""
    identity = f"{os.uname().nodename}\0{snapshot.root}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def packed_request(run_request: Mapping[str, Any]) -> bytes:
    """Return a request as the bytes to send."""
    # Digests compress badly.
    data = zlib.compress(json.dumps(run_request, separators=(",", ":")).encode("ascii"), 1)
    return struct.pack(">I", len(data)) + data


def blobs(root: Path, files: Collection[SnapshotFile]) -> Iterator[tuple[bytes, int]]:
    """Yield the encoded contents of files, each chunk with the number of content bytes that it represents.

    Raises:
        StoreError: a file cannot be read, or has changed since the snapshot was taken.
    """
    for file in files:
        yield from _iterate_blob(root, file)
    yield b".", 0


def _iterate_blob(root: Path, file: SnapshotFile) -> Iterator[tuple[bytes, int]]:
    chunks = content(root, file)
    first_chunk = next(chunks, b"")
    is_compressible = len(zlib.compress(first_chunk[:_SAMPLE_BYTES], 1)) < _MAX_RATIO * len(
        first_chunk[:_SAMPLE_BYTES]
    )
    compressor = zlib.compressobj(1)
    key = file.key.encode()
    yield (b"z" if is_compressible else b"r") + bytes([len(key)]) + key, 0
    chunk = first_chunk
    while chunk:
        payload = compressor.compress(chunk) if is_compressible else chunk
        if payload:
            yield struct.pack(">I", len(payload)) + payload, len(chunk)
        else:
            yield b"", len(chunk)
        chunk = next(chunks, b"")
    tail = compressor.flush() if is_compressible else b""
    if tail:
        yield struct.pack(">I", len(tail)) + tail, 0
    yield struct.pack(">I", 0), 0


def content(root: Path, snapshot_file: SnapshotFile) -> Iterator[bytes]:
    """Yield a file's content, and check that it is still what the snapshot recorded.

    Raises:
        StoreError: the file cannot be read, or has changed.
    """
    path = root / snapshot_file.path
    digest, size = hashlib.sha256(), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                yield chunk
    except FileNotFoundError:
        raise _changed_error(path, "was deleted") from None
    except OSError as error:
        raise store_error(error, path, "read") from error
    if size != snapshot_file.size or digest.hexdigest()[:DIGEST_LENGTH] != snapshot_file.digest:
        raise _changed_error(path, "was changed")


def _changed_error(path: Path, change: str) -> StoreError:
    return StoreError(
        f"{path} {change} while the run was being submitted; no job was queued",
        hint="submit again; if a program writes this file continuously, exclude the file from the snapshot",
    )
