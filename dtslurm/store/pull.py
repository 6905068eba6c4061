"""Local copies of files of run directories on another machine; only new content is transferred."""

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

_TAIL = 256  # bytes at the end of a copy that are compared; as in worker/delivery/send.py
_MAX_PIECE = 1 << 20  # as in worker/delivery/send.py
_MAX_HEAD = 1 << 23  # 200 names of excluded files, in JSON's longest form
_MAX_FILES = 500_000
_MAX_NAMES_BYTES = 1 << 26
_MAX_SHOWN = 100
_EXIT_WAIT_S = 2.0
_SENDER = "the remote file sender"


@dataclass(frozen=True)
class PullSpec:
    """The files to copy of one run directory.

    Attributes:
        source: the remote run directory.
        target: the local folder, created with mode 0700 if it is missing.
        patterns: patterns of paths below the run directory; ``*`` also matches slashes.
        skip: names of top-level folders and files that are not copied.
        outputs_only: whether only those files of ``code/`` are copied that the job wrote there.
        hidden: whether files are copied whose path has a name that begins with a dot; ``.git`` never is.
    """

    source: str
    target: Path
    patterns: tuple[str, ...]
    skip: tuple[str, ...] = ("code",)
    outputs_only: bool = False
    hidden: bool = True

    def takes(self, path: str) -> bool:
        """Return whether the file at a path below the run directory is selected, judged by the path alone."""
        names = path.split("/")
        return (
            names[0] not in self.skip
            and not is_withheld(names, sends_hidden=self.hidden)
            and any(fnmatchcase(path, pattern) for pattern in self.patterns)
        )


@dataclass(frozen=True)
class UnsentFiles:
    """Files of a run directory that match a pattern but were not sent.

    Attributes:
        snapshot: the number of unchanged files of the code snapshot.
        byte_code: the number of files with byte code in ``code/``.
        not_files: the number of links, pipes and sockets.
        outputs: the number of the job's files in ``code/`` that match no pattern.
        hidden: the number of files with a name that begins with a dot.
        names: the first of the links, pipes and sockets.
        skipped: the existing names of `PullSpec.skip`.
        hidden_names: the first of the files with a name that begins with a dot.
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
    """The result of a copy.

    Attributes:
        bytes: the number of transferred bytes.
        files: local paths of new or changed files.
        source_files: the number of source files that were compared or sent.
        unreadable: by path, why a source, or a file in it, could not be read.
        mismatched: local paths whose content differs from the source's.
        left: unsent files of each source, by the source's index.
    """

    bytes: int = 0
    files: list[Path] = field(default_factory=list)
    source_files: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    mismatched: list[Path] = field(default_factory=list)
    left: dict[int, UnsentFiles] = field(default_factory=dict)


def copy(
    transport: Transport,
    specs: Sequence[PullSpec],
    *,
    python: str = "python3",
    digests: bool = False,
    progress: Callable[[Path, int, int], None] = lambda *_: None,
) -> Copied:
    """Update the local copies of all specs, with one remote command.

    Args:
        digests: check every file's SHA-256 against the source's.
        progress: called with (local path, its bytes so far, its size).

    Raises:
        TransportError: the connection or the command failed; received data is kept, and the next call
            resumes.
        StoreError: a local file cannot be written.
    """
    program = worker_source(
        "lib.disk", "lib.json_records", "delivery.objects", "delivery.code_files", "delivery.send"
    )
    requests = [_make_request(spec) for spec in specs]
    stdin = program + json.dumps({"runs": requests, "digests": digests}).encode("ascii") + b"\n"
    receiver = _Receiver(specs, [request["have"] for request in requests], progress)
    with transport.stream([python, "-I", "-S", "-c", BOOT, str(len(program))], stdin=stdin) as stream:
        try:
            for head, data in _read_frames(iter(stream)):
                receiver.take(head, data)
        except OSError as error:
            raise StoreError(
                f"cannot write the local copy: {error.strerror}", evidence=[str(error)]
            ) from error
        _await_exit(stream)
    return receiver.result


def _await_exit(stream: Stream) -> None:
    """Wait up to `_EXIT_WAIT_S` seconds for the command's end; killing it would need another command."""
    deadline = time.monotonic() + _EXIT_WAIT_S
    with contextlib.suppress(TransportError):
        while not stream.ended and time.monotonic() < deadline:
            stream.read(max(0.0, deadline - time.monotonic()))


def _make_request(spec: PullSpec) -> dict[str, Any]:
    copies = {str(path.relative_to(spec.target)): _describe_copy(path) for path in _iterate_copies(spec)}
    return {
        "path": spec.source,
        "patterns": spec.patterns,
        "skip": spec.skip,
        "outputs_only": spec.outputs_only,
        "hidden": spec.hidden,
        "have": copies,
    }


def _iterate_copies(spec: PullSpec) -> Iterator[Path]:
    """Yield the existing copies that are selected; a symbolic link is not a copy."""
    for folder, subfolders, names in os.walk(spec.target):
        subfolders[:] = [name for name in subfolders if not is_withheld([name], sends_hidden=spec.hidden)]
        for name in names:
            path = Path(folder) / name
            if spec.takes(str(path.relative_to(spec.target))) and stat.S_ISREG(path.lstat().st_mode):
                yield path


def _describe_copy(path: Path) -> tuple[int, int, int]:
    """Return the size, mtime_ns and checksum of the last bytes of a copy."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        file.seek(max(0, status.st_size - _TAIL))
        return status.st_size, status.st_mtime_ns, zlib.crc32(file.read(_TAIL))


def _read_frames(chunks: Iterator[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield frames, each a JSON object and the bytes that it announces, until the end frame.

    Raises:
        TransportError: the bytes end before that frame.
        InvalidAnswer: the bytes are not frames, or a frame is too large.
    """
    buffer = bytearray()

    def receive() -> None:
        chunk = next(chunks, None)
        if chunk is None:
            raise TransportError("the connection ended in the middle of the transfer")
        buffer.extend(chunk)

    while True:
        searched_size = 0
        while (end := buffer.find(b"\n", searched_size)) < 0:
            searched_size = len(buffer)
            if searched_size > _MAX_HEAD:
                raise answers.invalid(_SENDER, f"a frame header of more than {_MAX_HEAD >> 20} MiB")
            receive()
        head = answers.parse_object(bytes(buffer[:end]), _SENDER)
        del buffer[: end + 1]
        if head.get("end"):
            return
        length = answers.read_whole(head, "length", _SENDER) if "length" in head else 0
        if length > _MAX_PIECE:
            raise answers.invalid(_SENDER, f"a frame of {length} bytes")
        while len(buffer) < length:
            receive()
        data = bytes(buffer[:length])
        del buffer[:length]
        yield head, data


class _Receiver:
    """Writes the pieces of the requested files, and rejects everything else.

    Each file is sent once, in consecutive pieces: from its start, or from the end of the local copy.
    """

    def __init__(
        self,
        specs: Sequence[PullSpec],
        copies: Sequence[Mapping[str, tuple[int, int, int]]],
        progress: Callable[[Path, int, int], None],
    ) -> None:
        self.result = Copied()
        self._specs, self._copies, self._progress = specs, copies, progress
        self._files_started: set[tuple[int, str]] = set()
        self._names_bytes = 0
        self._file: tuple[int, str] | None = None  # the file whose pieces are being received
        self._offset = self._size = 0  # expected offset of the next piece; size of the file
        self._ended = False  # set by an empty piece, which is a file's last

    def take(self, head: Mapping[str, Any], data: bytes) -> None:
        """Process a frame.

        Raises:
            InvalidAnswer: the frame is not a valid answer to the request.
            OSError: a local file cannot be written.
        """
        run = answers.read_whole(head, "run", _SENDER)
        if run >= len(self._specs):
            raise answers.invalid(_SENDER, f"a file of run {run}, of {len(self._specs)} that were requested")
        if "gone" in head:
            self._handle_unreadable(run, head)
        elif "left" in head:
            if run in self.result.left:
                raise answers.invalid(_SENDER, "the list of skipped files twice")
            self.result.left[run] = answers.interpret(head["left"], _parse_unsent, _SENDER)
        else:
            path = answers.read_path(head, "path", _SENDER)
            if not self._specs[run].takes(path):
                raise answers.invalid(_SENDER, "a file that was not requested", repr(path))
            copy_path = _copy_path(self._specs[run].target, path)
            if "sha256" in head:
                self._handle_digest((run, path), copy_path, answers.read_text(head, "sha256", _SENDER))
            else:
                self._handle_piece((run, path), copy_path, head, data)

    def _handle_unreadable(self, run: int, head: Mapping[str, Any]) -> None:
        reason = answers.read_text(head, "gone", _SENDER)
        path = answers.read_text(head, "path", _SENDER) if "path" in head else ""
        if (run, path) != self._file:  # else the current file became unreadable
            self._start_file((run, path), len(reason))
        self._file = None
        self.result.unreadable[f"{self._specs[run].source}/{path}".rstrip("/")] = reason

    def _handle_digest(self, file: tuple[int, str], path: Path, sha256: str) -> None:
        if file != self._file:
            raise answers.invalid(_SENDER, "the checksum of a file that it did not send", repr(file[1]))
        self._file = None
        self.result.source_files += 1
        if _digest(path) != sha256:
            self.result.mismatched.append(path)

    def _handle_piece(self, file: tuple[int, str], path: Path, head: Mapping[str, Any], data: bytes) -> None:
        offset, size = (answers.read_whole(head, key, _SENDER) for key in ("offset", "size"))
        mtime_ns = answers.read_whole(head, "mtime_ns", _SENDER, minimum=-answers.LARGEST_NUMBER)
        end = offset + len(data)
        if file != self._file:
            copy_size = self._copies[file[0]].get(file[1], (0, 0, 0))[0]
            self._start_file(file)
            is_valid = offset in {0, copy_size} or offset == size
        else:
            is_valid = not self._ended and (offset, size) == (self._offset, self._size)
        if not is_valid or end > size:
            raise answers.invalid(_SENDER, f"bytes {offset} to {end} of {size} of a file", repr(file[1]))
        self._file, self._offset, self._size = file, end, size
        self._ended = not data
        is_new = bool(data) or not path.exists()
        _write_piece(path, data, offset, size, mtime_ns)
        self.result.bytes += len(data)
        if is_new and path not in self.result.files[-1:]:
            self.result.files.append(path)
        self._progress(path, end, size)

    def _start_file(self, file: tuple[int, str], extra_bytes: int = 0) -> None:
        """Record a file, which may be sent only once."""
        self._names_bytes += len(file[1]) + extra_bytes
        if file in self._files_started:
            raise answers.invalid(_SENDER, "a file twice", repr(file[1]))
        if len(self._files_started) >= _MAX_FILES or self._names_bytes > _MAX_NAMES_BYTES:
            raise answers.invalid(
                _SENDER,
                f"more than {_MAX_FILES:,} files, or {_MAX_NAMES_BYTES >> 20} MiB of names",
                hint="download a part of the files with a pattern such as 'checkpoints/*'",
            )
        self._files_started.add(file)


def _parse_unsent(counts: Mapping[str, Any]) -> UnsentFiles:
    return UnsentFiles(
        snapshot=answers.read_whole(counts, "snapshot", _SENDER),
        byte_code=answers.read_whole(counts, "byte_code", _SENDER),
        not_files=answers.read_whole(counts, "not_files", _SENDER),
        outputs=answers.read_whole(counts, "outputs", _SENDER),
        hidden=answers.read_whole(counts, "hidden", _SENDER),
        names=tuple(map(str, counts["names"][:_MAX_SHOWN])),
        skipped=tuple(map(str, counts["skipped"][:_MAX_SHOWN])),
        hidden_names=tuple(sorted(map(str, counts["hidden_names"][:_MAX_SHOWN]))),
    )


def _copy_path(target: Path, name: str) -> Path:
    """Return the path of a copy, and check its parents, because a symbolic link could lead out of the folder.

    Raises:
        TransportError: a parent is a symbolic link.
    """
    path = target / name
    folder = path.parent
    while folder not in {target, target.parent}:
        if folder.is_symlink():
            raise TransportError("a folder of the local copy is a symbolic link", evidence=[str(folder)])
        folder = folder.parent
    return path


def _write_piece(path: Path, data: bytes, offset: int, size: int, mtime_ns: int) -> None:
    """Write a piece at its offset; writing it twice is harmless, so that two processes may pull at once."""
    make_folders(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, "the path exists and is not a file", str(path))
        os.lseek(fd, offset, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        end = offset + len(data)
        if os.fstat(fd).st_size > max(end, size):  # the source was truncated or replaced
            os.ftruncate(fd, end)
        if end == size:
            os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
