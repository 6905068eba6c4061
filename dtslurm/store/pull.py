"""Copies, on this machine, of files of run directories on another: only what is new travels."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dtslurm.errors import StoreError, TransportError
from dtslurm.model.own_files import make_folders
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.remote.worker_program import BOOT, worker_source
from dtslurm.transport.base import Stream, Transport
from dtslurm.worker.delivery.send import is_withheld

_TAIL = 256  # as in worker/delivery/send.py
_LARGEST_PIECE = 1 << 20  # as in worker/delivery/send.py
_LONGEST_HEAD = 1 << 23  # two hundred names of files that were left out, in JSON's longest form
_MOST_FILES = 500_000
_MOST_NAMES_BYTES = 1 << 26
_MOST_SHOWN = 100
_GOODBYE_S = 2.0
_SENDER = "the program that sends files of a run"


@dataclass(frozen=True)
class PullSpec:
    """What to copy of one run directory.

    Attributes:
        source: the run directory there.
        target: the folder here, made with mode 0700 where missing.
        patterns: of paths below it; ``*`` matches slashes too.
        skip: names at its top that stay there: folders with all that is in them, and files.
        outputs_only: whether of the files in ``code/`` only those come that the job wrote there.
        hidden: whether files come whose path has a name that begins with a dot; of a ``.git`` none comes.
    """

    source: str
    target: Path
    patterns: tuple[str, ...]
    skip: tuple[str, ...] = ("code",)
    outputs_only: bool = False
    hidden: bool = True

    def takes(self, path: str) -> bool:
        """Whether the file of a path below the run directory is wanted, as far as its path tells."""
        names = path.split("/")
        return (
            names[0] not in self.skip
            and not is_withheld(names, hidden=self.hidden)
            and any(fnmatchcase(path, pattern) for pattern in self.patterns)
        )


@dataclass(frozen=True)
class UnsentFiles:
    """Files of a run directory that match a pattern and were not sent.

    Attributes:
        snapshot, byte_code: how many of ``code/``: unchanged files of the snapshot, and byte code.
        not_files: how many links, pipes and sockets; ``names`` are the first of them.
        skipped: names of `PullSpec.skip` that are there.
        outputs: how many files of the job in ``code/`` match no pattern.
        hidden: how many with a name that begins with a dot; ``hidden_names`` are the first of them.
    """

    snapshot: int = 0
    byte_code: int = 0
    not_files: int = 0
    outputs: int = 0
    hidden: int = 0
    names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    hidden_names: tuple[str, ...] = ()


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
    left: dict[int, UnsentFiles] = field(default_factory=dict)


def copy(
    transport: Transport,
    wanted: Sequence[PullSpec],
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
    source = worker_source("lib.disk", "delivery.objects", "delivery.code_files", "delivery.send")
    requests = [_request(item) for item in wanted]
    body = source + json.dumps({"runs": requests, "digests": digests}).encode("ascii") + b"\n"
    receiver = _Receiver(wanted, [request["have"] for request in requests], progress)
    with transport.stream([python, "-I", "-S", "-c", BOOT, str(len(source))], stdin=body) as stream:
        try:
            for head, data in _read_frames(iter(stream)):
                receiver.take(head, data)
        except OSError as error:
            raise StoreError(f"cannot keep a copy: {error.strerror}", evidence=[str(error)]) from error
        _see_its_end(stream)
    return receiver.result


def _see_its_end(stream: Stream) -> None:
    """Wait a moment for a command that has said its last: to kill it would be one more command there."""
    deadline = time.monotonic() + _GOODBYE_S
    with contextlib.suppress(TransportError):
        while not stream.ended and time.monotonic() < deadline:
            stream.read(max(0.0, deadline - time.monotonic()))


def _request(wanted: PullSpec) -> dict[str, Any]:
    have = {str(path.relative_to(wanted.target)): _known(path) for path in _files(wanted)}
    return {
        "path": wanted.source,
        "patterns": wanted.patterns,
        "skip": wanted.skip,
        "outputs_only": wanted.outputs_only,
        "hidden": wanted.hidden,
        "have": have,
    }


def _files(wanted: PullSpec) -> Iterator[Path]:
    """Yield the copies that are there and wanted; a link is no copy."""
    for folder, below, names in os.walk(wanted.target):
        below[:] = [name for name in below if not is_withheld([name], hidden=wanted.hidden)]
        for name in names:
            path = Path(folder) / name
            if wanted.takes(str(path.relative_to(wanted.target))) and stat.S_ISREG(path.lstat().st_mode):
                yield path


def _known(path: Path) -> tuple[int, int, int]:
    """Return size, time and the checksum of the last bytes of a copy."""
    with path.open("rb") as file:
        now = os.fstat(file.fileno())
        file.seek(max(0, now.st_size - _TAIL))
        return now.st_size, now.st_mtime_ns, zlib.crc32(file.read(_TAIL))


def _read_frames(chunks: Iterator[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield frames, a JSON object and the bytes that it announces, up to the frame that ends them.

    Raises:
        TransportError: the bytes end before that frame.
        InvalidAnswer: the bytes are no frames, or a frame is too large.
    """
    buffer = bytearray()

    def receive() -> None:
        chunk = next(chunks, None)
        if chunk is None:
            raise TransportError("the far side stopped in the middle of what it sent")
        buffer.extend(chunk)

    while True:
        searched = 0
        while (end := buffer.find(b"\n", searched)) < 0:
            searched = len(buffer)
            if searched > _LONGEST_HEAD:
                raise answers.invalid(_SENDER, f"a frame's head of more than {_LONGEST_HEAD >> 20} MiB")
            receive()
        head = answers.parse_object(bytes(buffer[:end]), _SENDER)
        del buffer[: end + 1]
        if head.get("end"):
            return
        length = answers.read_whole(head, "length", _SENDER) if "length" in head else 0
        if length > _LARGEST_PIECE:
            raise answers.invalid(_SENDER, f"a frame of {length} bytes")
        while len(buffer) < length:
            receive()
        data = bytes(buffer[:length])
        del buffer[:length]
        yield head, data


class _Receiver:
    """Writes the pieces of files that were requested, and refuses all else.

    A file comes once, in pieces one after the other: from its start, or from where the copy here ends.
    """

    def __init__(
        self,
        wanted: Sequence[PullSpec],
        have: Sequence[Mapping[str, tuple[int, int, int]]],
        progress: Callable[[Path, int, int], None],
    ) -> None:
        self.result = Copied()
        self._wanted, self._have, self._progress = wanted, have, progress
        self._seen: set[tuple[int, str]] = set()
        self._names_bytes = 0
        self._file: tuple[int, str] | None = None  # whose pieces come now
        self._offset = self._size = 0  # of the next piece; of the file
        self._ended = False  # an empty piece is the last one

    def take(self, head: Mapping[str, Any], data: bytes) -> None:
        """Do what a frame says.

        Raises:
            InvalidAnswer: the frame is not one that the request can have as its answer.
            OSError: the disk here refused.
        """
        run = answers.read_whole(head, "run", _SENDER)
        if run >= len(self._wanted):
            raise answers.invalid(_SENDER, f"a file of run {run}, of {len(self._wanted)} that were requested")
        if "gone" in head:
            self._take_gone(run, head)
        elif "left" in head:
            if run in self.result.left:
                raise answers.invalid(_SENDER, "twice what it left out of a run")
            self.result.left[run] = answers.interpret(head["left"], _left_out, _SENDER)
        else:
            path = answers.read_path(head, "path", _SENDER)
            if not self._wanted[run].takes(path):
                raise answers.invalid(_SENDER, "a file that was not requested", repr(path))
            place = _inside(self._wanted[run].target, path)
            if "sha256" in head:
                self._take_digest((run, path), place, answers.read_text(head, "sha256", _SENDER))
            else:
                self._take_piece((run, path), place, head, data)

    def _take_gone(self, run: int, head: Mapping[str, Any]) -> None:
        reason = answers.read_text(head, "gone", _SENDER)
        path = answers.read_text(head, "path", _SENDER) if "path" in head else ""
        if (run, path) != self._file:  # else it became unreadable in its middle
            self._begin((run, path), len(reason))
        self._file = None
        self.result.gone[f"{self._wanted[run].source}/{path}".rstrip("/")] = reason

    def _take_digest(self, file: tuple[int, str], place: Path, sha256: str) -> None:
        if file != self._file:
            raise answers.invalid(_SENDER, "the checksum of a file that it has not sent", repr(file[1]))
        self._file = None
        self.result.seen += 1
        if _digest(place) != sha256:
            self.result.wrong.append(place)

    def _take_piece(self, file: tuple[int, str], place: Path, head: Mapping[str, Any], data: bytes) -> None:
        offset, size = (answers.read_whole(head, key, _SENDER) for key in ("offset", "size"))
        mtime_ns = answers.read_whole(head, "mtime_ns", _SENDER, least=-answers.LARGEST_NUMBER)
        end = offset + len(data)
        if file != self._file:
            have = self._have[file[0]].get(file[1], (0, 0, 0))[0]
            self._begin(file)
            valid = offset in {0, have} or offset == size
        else:
            valid = not self._ended and (offset, size) == (self._offset, self._size)
        if not valid or end > size:
            raise answers.invalid(_SENDER, f"bytes {offset} to {end} of {size} of a file", repr(file[1]))
        self._file, self._offset, self._size = file, end, size
        self._ended = not data
        is_news = bool(data) or not place.exists()
        _write(place, data, offset, size, mtime_ns)
        self.result.bytes += len(data)
        if is_news and place not in self.result.files[-1:]:
            self.result.files.append(place)
        self._progress(place, end, size)

    def _begin(self, file: tuple[int, str], more: int = 0) -> None:
        """Count a file, which comes once."""
        self._names_bytes += len(file[1]) + more
        if file in self._seen:
            raise answers.invalid(_SENDER, "a file twice", repr(file[1]))
        if len(self._seen) >= _MOST_FILES or self._names_bytes > _MOST_NAMES_BYTES:
            raise answers.invalid(
                _SENDER,
                f"more than {_MOST_FILES:,} files, or {_MOST_NAMES_BYTES >> 20} MiB of names",
                hint="bring a part of the files, by a pattern such as 'checkpoints/*'",
            )
        self._seen.add(file)


def _left_out(counts: Mapping[str, Any]) -> UnsentFiles:
    return UnsentFiles(
        snapshot=answers.read_whole(counts, "snapshot", _SENDER),
        byte_code=answers.read_whole(counts, "byte_code", _SENDER),
        not_files=answers.read_whole(counts, "not_files", _SENDER),
        outputs=answers.read_whole(counts, "outputs", _SENDER),
        hidden=answers.read_whole(counts, "hidden", _SENDER),
        names=tuple(map(str, counts["names"][:_MOST_SHOWN])),
        skipped=tuple(map(str, counts["skipped"][:_MOST_SHOWN])),
        hidden_names=tuple(sorted(map(str, counts["hidden_names"][:_MOST_SHOWN]))),
    )


def _inside(target: Path, name: str) -> Path:
    """Return the path of a copy; a link on the way to it may lead out of the folder.

    Raises:
        TransportError: there is such a link.
    """
    path = target / name
    folder = path.parent
    while folder not in {target, target.parent}:
        if folder.is_symlink():
            raise TransportError("a link stands where a folder of copies should be", evidence=[str(folder)])
        folder = folder.parent
    return path


def _write(path: Path, data: bytes, offset: int, size: int, mtime_ns: int) -> None:
    """Write a piece at its place: doing so twice does no harm, so two readers may run at once."""
    make_folders(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EEXIST, "something that is not a file is there", str(path))
        os.lseek(handle, offset, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        end = offset + len(data)
        if os.fstat(handle).st_size > max(end, size):  # the source was cut off, or is another file
            os.ftruncate(handle, end)
        if end == size:
            os.utime(handle, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
