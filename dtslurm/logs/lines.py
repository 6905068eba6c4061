"""Assemble the bytes of log files into complete lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from dtslurm.logs.frames import SENDER, protocol_error
from dtslurm.model.jobs.job import LogLine
from dtslurm.model.jobs.roles import NAME
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.worker.logtail.files import CHECKED

_TASK = re.compile(r"[0-9]{1,9}")
_ROLE = re.compile(rf"(?:{_TASK.pattern}/)?(?:{NAME.pattern})")
LONGEST_LINE = 1 << 16  # in bytes; longer lines are split, so that memory use stays bounded


@dataclass(frozen=True)
class LogFile:
    """One log file of a run.

    Attributes:
        kind: ``batch``, ``node`` (the launcher's output on a node), ``rank``, ``role``, ``events`` or
            ``metrics``.
        number: the number of the rank, the node, or the instance of a role.
        attempt: the attempt, or the start of an instance of a role.
        task: the array task. For the output of a role, the name of the role, in an array after ``TASK/``.
    """

    kind: str
    number: int = 0
    attempt: int = 0
    task: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LogFile:
        """Return the file that the remote log follower describes.

        Raises:
            TransportError: the description is invalid.
        """
        kind, task = values.get("kind"), values.get("task")
        if kind not in ("batch", "node", "rank", "role", "events", "metrics"):
            raise protocol_error(f"a file of an unknown kind: {values}"[:200])
        number, attempt = (answers.read_whole(values, key, SENDER) for key in ("number", "attempt"))
        pattern = _ROLE if kind == "role" else _TASK
        if not ((task is None and kind != "role") or (isinstance(task, str) and pattern.fullmatch(task))):
            raise protocol_error(f"a file of no task: {values}"[:200])
        return cls(kind, number, attempt, task)

    @property
    def source(self) -> str:
        """The prefix of the file's lines: the number of the rank or instance, ``node0`` or ``batch``."""
        number = str(self.number)
        return {"rank": number, "node": f"node{number}", "role": number}.get(self.kind, self.kind)

    @property
    def rank(self) -> int | None:
        """The rank that wrote the file, None if it is not the output of a rank."""
        return self.number if self.kind == "rank" else None


@dataclass(frozen=True)
class LogBlock:
    """A block of complete lines of one file, which are processed together for speed.

    Attributes:
        data: the lines, each with its trailing newline.
    """

    file: LogFile
    data: bytes

    def texts(self) -> list[str]:
        """Return the texts of the lines as a terminal shows them: only the text after the last ``\\r``."""
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
    """An assembler of one file's bytes into lines, which keeps the reading position in the file.

    Attributes:
        offset: number of bytes received from the file's start.
        checked: the last bytes received, by which the remote log follower verifies the position when it
            resumes.
        rest: the start of a line whose end has not arrived.
    """

    file: LogFile
    name: str
    inode: int = 0
    offset: int = 0
    checked: bytes = b""
    rest: bytearray = field(default_factory=bytearray)

    def feed(self, offset: int, data: bytes) -> LogBlock | None:
        """Add bytes and return the complete lines.

        Raises:
            TransportError: the bytes do not start at ``self.offset``.
        """
        if offset != self.offset:
            raise protocol_error(f"data at byte {offset} of {self.name} instead of byte {self.offset}")
        self.offset += len(data)
        self.checked = (self.checked + data)[-CHECKED:] if len(data) < CHECKED else data[-CHECKED:]
        end = data.rfind(b"\n") + 1
        if not end:
            self.rest += data
            return self._split_long_line()
        complete_bytes = data[:end] if end < len(data) else data
        if self.rest:
            complete_bytes = bytes(self.rest) + complete_bytes
        self.rest = bytearray(data[end:])
        return LogBlock(self.file, complete_bytes)

    def flush(self) -> LogBlock | None:
        """Return the unfinished line at the end of the file."""
        if not self.rest:
            return None
        data = bytes(self.rest) + b"\n"
        self.rest = bytearray()
        return LogBlock(self.file, data)

    def rewritten(self) -> str | None:
        """Return the visible text of an unfinished progress bar (a line with ``\\r``), or None."""
        text = self.rest.rstrip(b"\r")
        start = text.rfind(b"\r") + 1
        if not start and len(text) == len(self.rest):
            return None
        return text[start:].decode("utf-8", "replace")

    def _split_long_line(self) -> LogBlock | None:
        if len(self.rest) <= LONGEST_LINE:
            return None
        start = self.rest.rfind(b"\r", 0, len(self.rest) - 1) + 1
        if start:  # a progress bar: keep only its last state
            del self.rest[:start]
        lines = bytearray()
        while len(self.rest) > LONGEST_LINE:
            cut = LONGEST_LINE
            while cut > LONGEST_LINE - 4 and self.rest[cut] & 0xC0 == 0x80:  # do not split a UTF-8 character
                cut -= 1
            lines += self.rest[:cut] + b"\n"
            del self.rest[:cut]
        return LogBlock(self.file, bytes(lines)) if lines else None
