"""Log following where the far side has no Python but a shell: it is asked for sizes, then for what is new.

It is slower (a look every second, at most `MOST_FILES` files, three characters to a byte) and cannot choose
ranks by node nor sum up; what it gives are the same frames (`dtslurm.worker.logtail.frames`).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from dtslurm.logs.frames import Frame, nonsense
from dtslurm.model.values import dataclass
from dtslurm.worker.logtail import frames as wire
from dtslurm.worker.logtail.files import within

MOST_FILES = 64
GREETING = b"dtslurm shell 1\n"
_PIECE = 1 << 18
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
    check: tuple[int, int] | None = None  # so many bytes before the offset still have to have this CRC-32

    def describe(self, why: str) -> Frame:
        values = {
            "name": self.name, "kind": self.kind, "number": self.number, "attempt": self.attempt,
            "task": self.task, "inode": self.inode, "offset": self.offset, "why": why,
        }  # fmt: skip
        self.told = True
        return Frame(wire.FILE, self.stream, json.dumps(values).encode())


@dataclass
class ShellTail:
    """What to ask the shell next, and what its answers mean.

    Attributes:
        request: as for the far side in Python (`dtslurm.worker.logtail.files.Request`).
        draining: the next look that finds nothing new is the last.
    """

    request: Mapping[str, Any]
    draining: bool = False
    ended: bool = False
    _files: dict[str, _TailedFile] = field(default_factory=dict)
    _asked: deque[tuple[str, _TailedFile | None]] = field(default_factory=deque)
    _answer: list[bytes] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)  # of a line
    _size: int = 0  # of the answer that comes
    _first: dict[str, int] = field(default_factory=dict)
    _started: bool = False
    _last_look: bool = False
    _too_many: bool = False
    _refused: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether nothing is asked."""
        return not self._asked

    def look(self) -> bytes:
        """Return the question with which every look begins."""
        self._last_look = self.draining
        self._asked.append(("list", None))
        return b"list 0 0 .\n"

    def feed(self, data: bytes) -> Iterator[Frame | bytes]:
        """Take what the shell wrote; yield frames, and further questions to send.

        Raises:
            TransportError: these are no answers.
        """
        self._size += len(data)
        if self._size > _LARGEST_ANSWER:
            raise nonsense(f"an answer of more than {_LARGEST_ANSWER >> 20} MiB")
        self._parts.append(data)
        if b"\n" not in data:
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        for line in lines:
            if line != b".":
                self._answer.append(line)
                continue
            if not self._asked:
                raise nonsense("an answer that nobody asked for")
            answer, self._answer, self._size = self._answer, [], 0
            question, file = self._asked.popleft()
            if file is None:
                yield from self._listed(answer)
            elif question == "last":
                file.offset = max(0, file.size - _number(answer))
                yield file.describe("new")
            else:
                yield from self._bytes(file, answer)
            if not self._asked:
                yield from self._next()

    def _next(self) -> Iterator[Frame | bytes]:
        questions = [
            self._read(file) for file in self._files.values() if file.size > file.offset or file.check
        ]
        if questions:
            yield b"".join(questions)
            return
        if not self._started:
            self._started = True
            self.draining = self._last_look = self.draining or not self.request["follow"]
            yield Frame(wire.CAUGHT_UP, 0, json.dumps({"first": self._first}).encode())
        if self._last_look:
            self.ended = True
            yield Frame(wire.END, 0, b"")

    def _read(self, file: _TailedFile) -> bytes:
        self._asked.append(("read", file))
        back = file.check[0] if file.check else 0
        return f"read {file.offset - back} {_PIECE} {file.name}\n".encode()

    def _bytes(self, file: _TailedFile, answer: list[bytes]) -> Iterator[Frame]:
        try:
            data = bytes.fromhex(b" ".join(answer).decode("ascii"))
        except ValueError as error:
            raise nonsense("bytes that are none") from error
        if file.check:
            back, crc = file.check
            same, file.check = zlib.crc32(data[:back]) == crc, None
            if not same:
                file.offset = 0
            yield file.describe("resumed" if same else "replaced")
            data = data[back:] if same else b""
        elif not data:
            file.size = file.offset  # it shrank meanwhile: the next look will tell
        if data:
            yield Frame(wire.DATA, file.stream, wire.OFFSET.pack(file.offset) + data)
            file.offset += len(data)
            file.size = max(file.size, file.offset)

    def _listed(self, answer: list[bytes]) -> Iterator[Frame | bytes]:
        sizes: dict[str, int] = {}
        inodes: dict[str, int] = {}
        for line in answer:
            what, _, rest = line.decode("utf-8", "replace").partition(" ")
            number, _, name = rest.partition(" ")
            if what in {"size", "inode"} and _is_count(number) and _NAME.fullmatch(name):
                (sizes if what == "size" else inodes)[name] = int(number)
        if not self._started:
            self._choose_attempts(sizes)
        questions: list[bytes] = []
        for name in sorted(sizes, key=_order):
            inode = inodes.get(name, 0)
            file = self._files.get(name)
            if file is None:
                file = self._new(name, inode)
                if file is None:
                    continue
                file.size = sizes[name]
                yield from self._begin(file, questions)
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
        if questions:
            yield b"".join(questions)

    def _begin(self, file: _TailedFile, questions: list[bytes]) -> Iterator[Frame]:
        known = self.request.get("positions", {}).get(file.name)
        lines = 1 if file.kind == "metrics" else self.request.get("lines")
        if known is not None:
            inode, offset, back, crc = known
            if inode == file.inode and file.size >= offset:
                file.offset, file.check = offset, (back, crc)
            else:
                yield file.describe("replaced")
        elif lines is not None and not self._started and file.kind != "events":
            self._asked.append(("last", file))
            questions.append(f"last {lines} {file.size} {file.name}\n".encode())
        else:
            yield file.describe("new")

    def _choose_attempts(self, names: Mapping[str, int]) -> None:
        since = self.request.get("since")
        for name in names:
            found = _NAME.fullmatch(name)
            if found is None or found["attempt"] is None:
                continue
            task = found["task"] or ""
            if since is not None:
                self._first[task] = since.get(task, 0)
            else:
                self._first[task] = max(self._first.get(task, 0), int(found["attempt"]))

    def _new(self, name: str, inode: int) -> _TailedFile | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        if found["batch"]:
            kind, number, attempt, task = "batch", 0, 0, found["of"]
        elif found["events"]:
            kind, number, attempt, task = "events", 0, 0, found["task"]
        elif found["metrics"]:
            kind, number, attempt, task = "metrics", 0, int(found["metrics"]), found["task"]
        else:
            kind, number, attempt, task = (
                found["kind"],
                int(found["number"]),
                int(found["attempt"]),
                found["task"],
            )
        request = self.request
        if (
            kind not in request["kinds"]
            or (task is None) == request["array"]
            or request["task"] not in {None, task}
            or (kind == "rank" and not within(request["ranks"], number))
            or (kind not in {"batch", "events"} and not self._wanted_attempt(task, attempt))
        ):
            return None
        if len(self._files) >= MOST_FILES:
            self._too_many = self._too_many or not self._refused
            self._refused.add(name)
            return None
        file = self._files[name] = _TailedFile(len(self._files) + 1, name, kind, number, attempt, task, inode)
        return file

    def _wanted_attempt(self, task: str | None, attempt: int) -> bool:
        if self.request["attempt"] is not None:
            return bool(attempt == self.request["attempt"])
        return attempt >= self._first.get(task or "", 0)


def _is_count(number: str) -> bool:
    return number.isdecimal() and len(number) <= _LONGEST_NUMBER


def _number(answer: list[bytes]) -> int:
    number = answer[0].decode("ascii", "replace").strip() if answer else ""
    if not _is_count(number):
        raise nonsense("a size that is none")
    return int(number)


def _order(name: str) -> list[tuple[bool, int, str]]:
    """Order names as their numbers tell; the batch script's output first."""
    words = re.split(r"(\d+)", name)
    return [(not name.startswith("logs/batch"), 0, "")] + [
        (True, int(word), "") if word.isdigit() else (False, 0, word) for word in words
    ]
