"""Log following over a shell, for login nodes without Python: query the file sizes, then read new bytes.

This is slower than the Python log follower (one poll per second, at most `MOST_FILES` files, three characters
per byte) and cannot select ranks by node or summarize output. It produces the same frames
(`dtslurm.worker.logtail.frames`).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from dtslurm.logs.frames import Frame, protocol_error
from dtslurm.model.values import dataclass
from dtslurm.worker.logtail import frames as wire
from dtslurm.worker.logtail.files import within

MOST_FILES = 64
GREETING = b"dtslurm shell 1\n"
_READ_SIZE = 1 << 18
_LARGEST_ANSWER = 1 << 24
_LONGEST_NUMBER = 20
_NAME = re.compile(
    r"(?:tasks/(?P<task>\d{1,9})/)?(?:logs/(?P<attempt>\d{1,9})/(?P<kind>node|rank)-(?P<number>\d{1,9})\.log"
    r"|logs/(?P<batch>batch)(?:-(?P<of>\d{1,9}))?\.log|(?P<events>events)\.jsonl"
    r"|metrics/(?P<metrics>\d{1,9})/train\.jsonl)"
)


@dataclass
class _TailedFile:
    stream: int
    name: str
    kind: str
    number: int
    attempt: int
    task: str | None
    inode: int
    offset: int = 0
    size: int = 0
    told: bool = False
    check: tuple[int, int] | None = None  # (count, CRC-32) of bytes before the offset, to be verified

    def describe(self, why: str) -> Frame:
        values = {
            "name": self.name, "kind": self.kind, "number": self.number, "attempt": self.attempt,
            "task": self.task, "inode": self.inode, "offset": self.offset, "why": why,
        }  # fmt: skip
        self.told = True
        return Frame(wire.FILE, self.stream, json.dumps(values).encode())


@dataclass
class ShellTail:
    """The client side of the shell protocol: sends commands and converts the answers into frames.

    Attributes:
        request: the same request as for the Python log follower (`dtslurm.worker.logtail.files.Request`).
        draining: end after the next poll that finds no new bytes.
    """

    request: Mapping[str, Any]
    draining: bool = False
    ended: bool = False
    _files: dict[str, _TailedFile] = field(default_factory=dict)
    _pending: deque[tuple[str, _TailedFile | None]] = field(default_factory=deque)
    _answer_lines: list[bytes] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)  # of an incomplete line
    _answer_size: int = 0  # bytes of the current answer
    _first_attempts: dict[str, int] = field(default_factory=dict)
    _started: bool = False
    _last_poll: bool = False
    _too_many: bool = False
    _refused: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether no command is waiting for an answer."""
        return not self._pending

    def look(self) -> bytes:
        """Return the command that starts a poll."""
        self._last_poll = self.draining
        self._pending.append(("list", None))
        return b"list 0 0 .\n"

    def feed(self, data: bytes) -> Iterator[Frame | bytes]:
        """Process output of the shell; yield frames, and commands (bytes) to send.

        Raises:
            TransportError: the output is not a valid answer.
        """
        self._answer_size += len(data)
        if self._answer_size > _LARGEST_ANSWER:
            raise protocol_error(f"an answer of more than {_LARGEST_ANSWER >> 20} MiB")
        self._parts.append(data)
        if b"\n" not in data:
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        for line in lines:
            if line != b".":
                self._answer_lines.append(line)
                continue
            if not self._pending:
                raise protocol_error("an answer that nobody asked for")
            answer, self._answer_lines, self._answer_size = self._answer_lines, [], 0
            command, file = self._pending.popleft()
            if file is None:
                yield from self._handle_list(answer)
            elif command == "last":
                file.offset = max(0, file.size - _parse_count(answer))
                yield file.describe("new")
            else:
                yield from self._handle_read(file, answer)
            if not self._pending:
                yield from self._continue_poll()

    def _continue_poll(self) -> Iterator[Frame | bytes]:
        commands = [
            self._read_command(file) for file in self._files.values() if file.size > file.offset or file.check
        ]
        if commands:
            yield b"".join(commands)
            return
        if not self._started:
            self._started = True
            self.draining = self._last_poll = self.draining or not self.request["follow"]
            yield Frame(wire.CAUGHT_UP, 0, json.dumps({"first": self._first_attempts}).encode())
        if self._last_poll:
            self.ended = True
            yield Frame(wire.END, 0, b"")

    def _read_command(self, file: _TailedFile) -> bytes:
        self._pending.append(("read", file))
        overlap = file.check[0] if file.check else 0
        return f"read {file.offset - overlap} {_READ_SIZE} {file.name}\n".encode()

    def _handle_read(self, file: _TailedFile, answer: list[bytes]) -> Iterator[Frame]:
        try:
            data = bytes.fromhex(b" ".join(answer).decode("ascii"))
        except ValueError as error:
            raise protocol_error("bytes that are none") from error
        if file.check:
            overlap, crc = file.check
            matches, file.check = zlib.crc32(data[:overlap]) == crc, None
            if not matches:
                file.offset = 0
            yield file.describe("resumed" if matches else "replaced")
            data = data[overlap:] if matches else b""
        elif not data:
            file.size = file.offset  # the file shrank meanwhile, which the next poll handles
        if data:
            yield Frame(wire.DATA, file.stream, wire.OFFSET.pack(file.offset) + data)
            file.offset += len(data)
            file.size = max(file.size, file.offset)

    def _handle_list(self, answer: list[bytes]) -> Iterator[Frame | bytes]:
        sizes: dict[str, int] = {}
        inodes: dict[str, int] = {}
        for line in answer:
            kind, _, rest = line.decode("utf-8", "replace").partition(" ")
            number, _, name = rest.partition(" ")
            if kind in {"size", "inode"} and _is_count(number) and _NAME.fullmatch(name):
                (sizes if kind == "size" else inodes)[name] = int(number)
        if not self._started:
            self._choose_attempts(sizes)
        commands: list[bytes] = []
        for name in sorted(sizes, key=_sort_key):
            inode = inodes.get(name, 0)
            file = self._files.get(name)
            if file is None:
                file = self._add_file(name, inode)
                if file is None:
                    continue
                file.size = sizes[name]
                yield from self._start_file(file, commands)
                continue
            file.size = sizes[name]
            if inode != file.inode or file.size < file.offset:
                why = "truncated" if inode == file.inode else "replaced"
                file.inode, file.offset = inode, 0
                yield file.describe(why)
        if self._too_many:
            self._too_many = False
            message = f"without Python there, only {MOST_FILES} log files can be followed: choose ranks"
            yield Frame(wire.TROUBLE, 1, json.dumps({"message": message}).encode())
        if commands:
            yield b"".join(commands)

    def _start_file(self, file: _TailedFile, questions: list[bytes]) -> Iterator[Frame]:
        resume_position = self.request.get("positions", {}).get(file.name)
        lines = 1 if file.kind == "metrics" else self.request.get("lines")
        if resume_position is not None:
            inode, offset, overlap, crc = resume_position
            if inode == file.inode and file.size >= offset:
                file.offset, file.check = offset, (overlap, crc)
            else:
                yield file.describe("replaced")
        elif lines is not None and not self._started and file.kind != "events":
            self._pending.append(("last", file))
            questions.append(f"last {lines} {file.size} {file.name}\n".encode())
        else:
            yield file.describe("new")

    def _choose_attempts(self, names: Mapping[str, int]) -> None:
        since = self.request.get("since")
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or match["attempt"] is None:
                continue
            task = match["task"] or ""
            if since is not None:
                self._first_attempts[task] = since.get(task, 0)
            else:
                self._first_attempts[task] = max(self._first_attempts.get(task, 0), int(match["attempt"]))

    def _add_file(self, name: str, inode: int) -> _TailedFile | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if match["batch"]:
            kind, number, attempt, task = "batch", 0, 0, match["of"]
        elif match["events"]:
            kind, number, attempt, task = "events", 0, 0, match["task"]
        elif match["metrics"]:
            kind, number, attempt, task = "metrics", 0, int(match["metrics"]), match["task"]
        else:
            kind, number, attempt, task = (
                match["kind"],
                int(match["number"]),
                int(match["attempt"]),
                match["task"],
            )
        request = self.request
        if (
            kind not in request["kinds"]
            or (task is None) == request["array"]
            or request["task"] not in {None, task}
            or (kind == "rank" and not within(request["ranks"], number))
            or (kind not in {"batch", "events"} and not self._is_selected_attempt(task, attempt))
        ):
            return None
        if len(self._files) >= MOST_FILES:
            self._too_many = self._too_many or not self._refused
            self._refused.add(name)
            return None
        file = self._files[name] = _TailedFile(len(self._files) + 1, name, kind, number, attempt, task, inode)
        return file

    def _is_selected_attempt(self, task: str | None, attempt: int) -> bool:
        if self.request["attempt"] is not None:
            return bool(attempt == self.request["attempt"])
        return attempt >= self._first_attempts.get(task or "", 0)


def _is_count(number: str) -> bool:
    return number.isdecimal() and len(number) <= _LONGEST_NUMBER


def _parse_count(answer: list[bytes]) -> int:
    number = answer[0].decode("ascii", "replace").strip() if answer else ""
    if not _is_count(number):
        raise protocol_error("a size that is none")
    return int(number)


def _sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders names by their numbers, with the batch script's output first."""
    words = re.split(r"(\d+)", name)
    return [(not name.startswith("logs/batch"), 0, "")] + [
        (True, int(word), "") if word.isdigit() else (False, 0, word) for word in words
    ]
