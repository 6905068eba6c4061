"""Keeps a million lines of many ranks' output in little memory; one thread adds, another reads."""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

CHUNK = 4096  # lines
MOST_LINES = 1_000_000
MOST_BYTES = 160_000_000
_LONGEST = 4096  # bytes of a line that are kept
ERRORS = re.compile(
    rb"(?:Error|Exception)\b|\berror\b|ERROR|Traceback|FATAL|\b[Ff]atal\b|Segmentation fault|core dumped"
    rb"|[Oo]ut of memory|oom-kill|Killed|Aborted|CANCELLED|NCCL WARN|\bXid\b|[Tt]imed out|Watchdog caught"
)
ANY_LINE = re.compile(rb"^", re.MULTILINE)


class _Chunk:
    """Some thousand lines: their bytes together, where each ends, and whose each is."""

    __slots__ = ("data", "ends", "sources")

    def __init__(self) -> None:
        self.data: bytes | bytearray = bytearray()
        self.ends = array("I")
        self.sources = array("I")

    def line(self, number: int) -> bytes:
        begin = self.ends[number - 1] if number else 0
        return bytes(self.data[begin : self.ends[number] - 1])


class LineStore:
    """Lines numbered as they came; the oldest go when there are too many.

    Attributes:
        first: number of the oldest line that is still kept.
        total: number that the next line will get.
        loading: whether lines that were there at the start are still to come.
        skipped: whether files have earlier lines that were not asked for.
    """

    def __init__(
        self, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES, *, loading: bool = False
    ) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lock = threading.Lock()
        self._chunks: deque[_Chunk] = deque([_Chunk()])
        self._names: list[str] = []
        self._ids: dict[str, int] = {}
        self._bytes = 0
        self.first = 0
        self.total = 0
        self.loading = loading
        self.skipped = False

    def add(self, source: str, data: bytes) -> None:
        """Append whole lines, each with its newline; of a line rewritten by ``\\r``, its last state."""
        lines = data.split(b"\n")
        lines.pop()
        if b"\r" in data:
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        with self._lock:
            number = self._ids.get(source)
            if number is None:
                number = self._ids[source] = len(self._names)
                self._names.append(source)
            for line in lines:
                self._append(number, line)

    def _append(self, source: int, line: bytes) -> None:
        chunk = self._chunks[-1]
        if len(chunk.ends) >= CHUNK:
            chunk.data = bytes(chunk.data)
            chunk = _Chunk()
            self._chunks.append(chunk)
            while len(self._chunks) > 2 and (
                len(self._chunks) * CHUNK > self._most_lines + CHUNK or self._bytes > self._most_bytes
            ):
                gone = self._chunks.popleft()
                self.first += CHUNK
                self._bytes -= len(gone.data)
        data = chunk.data
        if len(line) > _LONGEST:
            line = line[:_LONGEST] + "…".encode()
        data += line
        data += b"\n"
        self._bytes += len(line) + 1
        chunk.ends.append(len(data))
        chunk.sources.append(source)
        self.total += 1

    def clear(self) -> None:
        """Forget everything; numbers go on."""
        with self._lock:
            self._chunks = deque([_Chunk()])
            self._bytes = 0
            self.first = self.total

    def lines(self, numbers: Sequence[int]) -> list[tuple[str, str]]:
        """Return (source, text) of these lines; a line that is gone is empty."""
        with self._lock:
            return [self._line(number) for number in numbers]

    def _line(self, number: int) -> tuple[str, str]:
        if not self.first <= number < self.total:
            return "", ""
        at, inside = divmod(number - self.first, CHUNK)
        chunk = self._chunks[at]
        return self._names[chunk.sources[inside]], chunk.line(inside).decode("utf-8", "replace")

    def matches(self, pattern: re.Pattern[bytes], begin: int, end: int | None = None) -> Iterator[list[int]]:
        """Yield the numbers of lines from ``begin`` on that match, piece by piece."""
        while True:
            with self._lock:
                begin = max(begin, self.first)
                stop = self.total if end is None else min(end, self.total)
                if begin >= stop:
                    return
                at, inside = divmod(begin - self.first, CHUNK)
                chunk = self._chunks[at]
                data = bytes(chunk.data)
                ends = chunk.ends[:]
                base = self.first + at * CHUNK
            found = [base + number for number in _matching(pattern, data, ends, inside)]
            begin = base + len(ends)
            yield [number for number in found if number < stop]

    def backwards(self, pattern: re.Pattern[bytes], before: int, source: str = "") -> int | None:
        """Return the last line below ``before`` that matches, of any source or of one."""
        while True:
            with self._lock:
                before = min(before, self.total)
                if before <= self.first:
                    return None
                at, inside = divmod(before - 1 - self.first, CHUNK)
                chunk = self._chunks[at]
                data, ends, sources = bytes(chunk.data), chunk.ends[:], chunk.sources[:]
                base = self.first + at * CHUNK
                wanted = self._ids.get(source) if source else None
                if source and wanted is None:
                    return None
            found = [
                number
                for number in _matching(pattern, data, ends, 0)
                if number <= inside and (wanted is None or sources[number] == wanted)
            ]
            if found:
                return base + found[-1]
            before = base


def _matching(pattern: re.Pattern[bytes], data: bytes, ends: Sequence[int], begin: int) -> Iterator[int]:
    """Yield which lines match; the pattern is run over all of them at once."""
    place = ends[begin - 1] if begin else 0
    while place < len(data):
        found = pattern.search(data, place)
        if found is None:
            return
        number = bisect_right(ends, found.start())
        if number >= len(ends):
            return
        start = ends[number - 1] if number else 0
        stop = ends[number] - 1
        # A match over the end of a line is none; ask that line alone.
        if found.end() <= stop or pattern.search(data[start:stop]):
            yield number
        place = ends[number]


def compiled(text: str) -> re.Pattern[bytes]:
    """Return the pattern that a person typed; capitals count only if there are some.

    Raises:
        re.error: it is not a regular expression.
    """
    flags = re.MULTILINE if text != text.lower() else re.MULTILINE | re.IGNORECASE
    return re.compile(text.encode("utf-8"), flags)
