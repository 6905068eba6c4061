"""From the bytes of log files to whole lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from dtslurm.logs.frames import SENDER, nonsense
from dtslurm.model.jobs.job import LogLine
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.worker.logtail.files import CHECKED

_TASK = re.compile(r"[0-9]{1,9}")
LONGEST_LINE = 1 << 16  # what is longer is shown in pieces, so that memory stays bounded


@dataclass(frozen=True)
class LogFile:
    """One log file of a run.

    Attributes:
        kind: ``batch``, ``node`` (the launcher's output on a node), ``rank``, ``events`` or ``metrics``.
        number: of the rank or node.
    """

    kind: str
    number: int = 0
    attempt: int = 0
    task: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LogFile:
        """Return the file that the far side describes.

        Raises:
            TransportError: the description makes no sense.
        """
        kind, task = values.get("kind"), values.get("task")
        if kind not in ("batch", "node", "rank", "events", "metrics"):
            raise nonsense(f"a file of an unknown kind: {values}"[:200])
        number, attempt = (answers.read_whole(values, key, SENDER) for key in ("number", "attempt"))
        if not (task is None or (isinstance(task, str) and _TASK.fullmatch(task))):
            raise nonsense(f"a file of no task: {values}"[:200])
        return cls(kind, number, attempt, task)

    @property
    def source(self) -> str:
        """What stands before its lines: the rank's number, ``node0`` or ``batch``."""
        return {"rank": str(self.number), "node": f"node{self.number}"}.get(self.kind, self.kind)

    @property
    def rank(self) -> int | None:
        """The rank whose output it is, if it is one's."""
        return self.number if self.kind == "rank" else None


@dataclass(frozen=True)
class LogBlock:
    """Whole lines of one file, together as they came: what is many is handled at once.

    Attributes:
        data: the lines, each with its newline.
    """

    file: LogFile
    data: bytes

    def texts(self) -> list[str]:
        """Return the lines' texts as a terminal leaves them: of one rewritten by ``\\r``, its last state."""
        text = self.data.decode("utf-8", "replace")
        lines = text.split("\n")
        lines.pop()
        if "\r" not in text:
            return lines
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]

    def lines(self) -> Iterator[LogLine]:
        """Yield the lines."""
        file = self.file
        for text in self.texts():
            yield LogLine(source=file.source, text=text, rank=file.rank, attempt=file.attempt, task=file.task)


@dataclass
class Assembler:
    """Puts a file's bytes together to lines, and remembers where in it the reader stands.

    Attributes:
        offset: bytes received since the file's beginning.
        checked: the last bytes received, by which the far side knows the place again.
        rest: the piece of a line still without its end.
    """

    file: LogFile
    name: str
    inode: int = 0
    offset: int = 0
    checked: bytes = b""
    rest: bytearray = field(default_factory=bytearray)

    def feed(self, offset: int, data: bytes) -> LogBlock | None:
        """Take bytes; return the lines that are whole now.

        Raises:
            TransportError: they are not those that come next.
        """
        if offset != self.offset:
            raise nonsense(f"bytes from {offset} of {self.name} where those from {self.offset} come next")
        self.offset += len(data)
        self.checked = (self.checked + data)[-CHECKED:] if len(data) < CHECKED else data[-CHECKED:]
        end = data.rfind(b"\n") + 1
        if not end:
            self.rest += data
            return self._overlong()
        whole = data[:end] if end < len(data) else data
        if self.rest:
            whole = bytes(self.rest) + whole
        self.rest = bytearray(data[end:])
        return LogBlock(self.file, whole)

    def flush(self) -> LogBlock | None:
        """Return the unfinished line, once nothing more will come of it."""
        if not self.rest:
            return None
        data = bytes(self.rest) + b"\n"
        self.rest = bytearray()
        return LogBlock(self.file, data)

    def rewritten(self) -> str | None:
        """Return what an unfinished line shows that is being rewritten (a progress bar), None if none is."""
        text = self.rest.rstrip(b"\r")
        begin = text.rfind(b"\r") + 1
        if not begin and len(text) == len(self.rest):
            return None
        return text[begin:].decode("utf-8", "replace")

    def _overlong(self) -> LogBlock | None:
        if len(self.rest) <= LONGEST_LINE:
            return None
        begin = self.rest.rfind(b"\r", 0, len(self.rest) - 1) + 1
        if begin:  # a progress bar: only its last state counts
            del self.rest[:begin]
        pieces = bytearray()
        while len(self.rest) > LONGEST_LINE:
            cut = LONGEST_LINE
            while cut > LONGEST_LINE - 4 and self.rest[cut] & 0xC0 == 0x80:  # not within a character
                cut -= 1
            pieces += self.rest[:cut] + b"\n"
            del self.rest[:cut]
        return LogBlock(self.file, bytes(pieces)) if pieces else None
