"""Copies, on this machine, of files of run directories on another: only what is new travels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from dtslurm.errors import StoreError, TransportError
from dtslurm.model.values import dataclass
from dtslurm.store.worker_program import BOOT, worker_source
from dtslurm.transport.base import Stream, Transport

_TAIL = 256  # as in worker/send.py
_GOODBYE_S = 2.0


@dataclass(frozen=True)
class Wanted:
    """What to copy of one run directory.

    Attributes:
        source: the run directory there.
        target: the folder here, made with mode 0700 where missing.
        patterns: of paths below it; ``*`` matches slashes too.
        skip: names at its top that stay there: folders with all that is in them, and files.
        outputs_only: whether of the files in ``code/`` only those come that the job wrote there.
    """

    source: str
    target: Path
    patterns: tuple[str, ...]
    skip: tuple[str, ...] = ("code",)
    outputs_only: bool = False


@dataclass(frozen=True)
class LeftOut:
    """Files of a run directory that match a pattern and were not sent.

    Attributes:
        snapshot, byte_code: how many of ``code/``: unchanged files of the snapshot, and byte code.
        not_files: how many links, pipes and sockets; ``names`` are the first of them.
        skipped: names of `Wanted.skip` that are there.
        outputs: how many files of the job in ``code/`` match no pattern.
    """

    snapshot: int = 0
    byte_code: int = 0
    not_files: int = 0
    outputs: int = 0
    names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass
class Copied:
    """What came of it.

    Attributes:
        bytes: how many travelled.
        files: paths here that are new or changed.
        seen: how many files of the source were looked at, or sent.
        gone: why a source, or a file in it, could not be read.
        wrong: paths here whose bytes are not the source's.
        left: files of each source that were not sent, by its number.
    """

    bytes: int = 0
    files: list[Path] = field(default_factory=list)
    seen: int = 0
    gone: dict[str, str] = field(default_factory=dict)
    wrong: list[Path] = field(default_factory=list)
    left: dict[int, LeftOut] = field(default_factory=dict)


def copy(
    transport: Transport,
    wanted: Sequence[Wanted],
    *,
    python: str = "python3",
    digests: bool = False,
    progress: Callable[[Path, int, int], None] = lambda *_: None,
) -> Copied:
    """Bring the copies up to date, in one command there.

    Args:
        digests: check every file's SHA-256 against the source's.
        progress: called with (path here, bytes of it here, its size).

    Raises:
        TransportError: the link or the command failed; what came before stays, and the next call goes on.
        StoreError: the disk here refused.
    """
    source = worker_source("disk", "objects", "code_files", "send")
    request = {"runs": [_request(item) for item in wanted], "digests": digests}
    body = source + json.dumps(request).encode("ascii") + b"\n"
    result = Copied()
    with transport.stream([python, "-I", "-S", "-c", BOOT, str(len(source))], stdin=body) as stream:
        try:
            _take(_Frames(iter(stream)), wanted, result, progress)
        except OSError as error:
            raise StoreError(f"cannot keep a copy: {error.strerror}", evidence=[str(error)]) from error
        _see_its_end(stream)
    return result


def _see_its_end(stream: Stream) -> None:
    """Wait a moment for a command that has said its last: to kill it would be one more command there."""
    deadline = time.monotonic() + _GOODBYE_S
    with contextlib.suppress(TransportError):
        while not stream.ended and time.monotonic() < deadline:
            stream.read(max(0.0, deadline - time.monotonic()))


def _request(wanted: Wanted) -> dict[str, Any]:
    have = {str(path.relative_to(wanted.target)): _known(path) for path in _files(wanted)}
    return {
        "path": wanted.source,
        "patterns": wanted.patterns,
        "skip": wanted.skip,
        "outputs_only": wanted.outputs_only,
        "have": have,
    }


def _files(wanted: Wanted) -> Iterator[Path]:
    """Yield the copies that are there and wanted."""
    for folder, _, names in os.walk(wanted.target):
        for name in names:
            path = Path(folder) / name
            inside = str(path.relative_to(wanted.target))
            if any(fnmatchcase(inside, pattern) for pattern in wanted.patterns) and path.is_file():
                yield path


def _known(path: Path) -> tuple[int, int, int]:
    """Return size, time and the checksum of the last bytes of a copy."""
    with path.open("rb") as file:
        now = os.fstat(file.fileno())
        file.seek(max(0, now.st_size - _TAIL))
        return now.st_size, now.st_mtime_ns, zlib.crc32(file.read(_TAIL))


class _Frames:
    """Splits what comes into frames: a line of JSON, and the bytes that it announces."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = bytearray()

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        while True:
            while (end := self._buffer.find(b"\n")) < 0:
                self._more()
            head = _head(bytes(self._buffer[:end]))
            del self._buffer[: end + 1]
            length = int(head.get("length", 0))
            while len(self._buffer) < length:
                self._more()
            data = bytes(self._buffer[:length])
            del self._buffer[:length]
            if head.get("end"):
                return
            yield head, data

    def _more(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise TransportError("the far side stopped in the middle of what it sent")
        self._buffer += chunk


def _head(line: bytes) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise TransportError("the far side sent something else than files", evidence=[repr(line[:200])])
    return head


def _take(
    frames: _Frames,
    wanted: Sequence[Wanted],
    result: Copied,
    progress: Callable[[Path, int, int], None],
) -> None:
    for head, data in frames:
        item = wanted[head["run"]]
        if "gone" in head:
            result.gone[f"{item.source}/{head.get('path', '')}".rstrip("/")] = str(head["gone"])
            continue
        if "left" in head:
            result.left[head["run"]] = _left_out(head["left"])
            continue
        path = _inside(item.target, str(head["path"]))
        if "sha256" in head:
            result.seen += 1
            if _digest(path) != head["sha256"]:
                result.wrong.append(path)
            continue
        news = bool(data) or not path.exists()
        _write(path, data, head)
        result.bytes += len(data)
        if news and path not in result.files[-1:]:
            result.files.append(path)
        progress(path, head["offset"] + len(data), head["size"])


def _left_out(counts: Mapping[str, Any]) -> LeftOut:
    return LeftOut(
        snapshot=int(counts["snapshot"]),
        byte_code=int(counts["byte_code"]),
        not_files=int(counts["not_files"]),
        outputs=int(counts["outputs"]),
        names=tuple(map(str, counts["names"])),
        skipped=tuple(map(str, counts["skipped"])),
    )


def _inside(target: Path, name: str) -> Path:
    """Return the path of a copy; what would lead out of the folder is an attack."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise TransportError("the far side sent a file for another place", evidence=[repr(name)])
    path = target / parts
    folder = path.parent
    while folder not in {target, target.parent}:
        if folder.is_symlink():
            raise TransportError("a link stands where a folder of copies should be", evidence=[str(folder)])
        folder = folder.parent
    return path


def _write(path: Path, data: bytes, head: Mapping[str, Any]) -> None:
    """Write a piece at its place: doing so twice does no harm, so two readers may run at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.lseek(handle, head["offset"], os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        end = head["offset"] + len(data)
        if os.fstat(handle).st_size > max(end, head["size"]):  # the source was cut off, or is another file
            os.ftruncate(handle, end)
        if end == head["size"]:
            os.utime(handle, ns=(head["mtime_ns"], head["mtime_ns"]))
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
