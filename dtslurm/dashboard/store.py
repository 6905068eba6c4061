"""A compact store of a million output lines from many ranks; one thread adds lines, another reads them."""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

CHUNK = 4096  # lines in a full chunk
MOST_LINES = 1_000_000
MOST_BYTES = 160_000_000
_MAX_LINE_BYTES = 4096  # longer lines are truncated
ERRORS = re.compile(
    rb"(?:Error|Exception)\b|\berror\b|ERROR|Traceback|FATAL|\b[Ff]atal\b|Segmentation fault|core dumped"
    rb"|[Oo]ut of memory|oom-kill|Killed|Aborted|CANCELLED|NCCL WARN|\bXid\b|[Tt]imed out|Watchdog caught"
)
ANY_LINE = re.compile(rb"^", re.MULTILINE)


class _Chunk:
    """Up to `CHUNK` lines: their concatenated bytes, the end offset of each, and the source of each."""

    __slots__ = ("data", "ends", "sources")

    def __init__(self) -> None:
        self.data: bytes | bytearray = bytearray()
        self.ends = array("I")
        self.sources = array("I")

    def line(self, number: int) -> bytes:
        begin = self.ends[number - 1] if number else 0
        return bytes(self.data[begin : self.ends[number] - 1])


class LineStore:
    """Output lines numbered in order of arrival; the oldest lines are dropped at the size limits.

    Attributes:
        first: number of the oldest stored line.
        total: number of the next line.
        loading: whether lines that existed at the start have yet to arrive.
        skipped: whether files have earlier lines that were not requested.
    """

    def __init__(
        self, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES, *, loading: bool = False
    ) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lock = threading.Lock()
        self._chunks: deque[_Chunk] = deque([_Chunk()])
        self._source_names: list[str] = []
        self._source_ids: dict[str, int] = {}
        self._stored_bytes = 0
        self.first = 0
        self.total = 0
        self.loading = loading
        self.skipped = False

    def add(self, source: str, data: bytes) -> None:
        """Append complete lines; of a line rewritten with ``\\r``, only the last state is stored."""
        lines = data.split(b"\n")
        lines.pop()
        if b"\r" in data:
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        with self._lock:
            source_id = self._source_ids.get(source)
            if source_id is None:
                source_id = self._source_ids[source] = len(self._source_names)
                self._source_names.append(source)
            for line in lines:
                self._append_line(source_id, line)

    def _append_line(self, source: int, line: bytes) -> None:
        """Append a line, and drop the oldest chunks at the size limits; the caller holds the lock."""
        chunk = self._chunks[-1]
        if len(chunk.ends) >= CHUNK:
            chunk.data = bytes(chunk.data)
            chunk = _Chunk()
            self._chunks.append(chunk)
            while len(self._chunks) > 2 and (
                len(self._chunks) * CHUNK > self._most_lines + CHUNK or self._stored_bytes > self._most_bytes
            ):
                oldest_chunk = self._chunks.popleft()
                self.first += CHUNK
                self._stored_bytes -= len(oldest_chunk.data)
        data = chunk.data
        if len(line) > _MAX_LINE_BYTES:
            line = line[:_MAX_LINE_BYTES] + "…".encode()
        data += line
        data += b"\n"
        self._stored_bytes += len(line) + 1
        chunk.ends.append(len(data))
        chunk.sources.append(source)
        self.total += 1

    def clear(self) -> None:
        """Drop all lines; the numbering continues."""
        with self._lock:
            self._chunks = deque([_Chunk()])
            self._stored_bytes = 0
            self.first = self.total

    def lines(self, numbers: Sequence[int]) -> list[tuple[str, str]]:
        """Return (source, text) of these lines; both are empty for a dropped line."""
        with self._lock:
            return [self._read_line(number) for number in numbers]

    def _read_line(self, number: int) -> tuple[str, str]:
        if not self.first <= number < self.total:
            return "", ""
        chunk_index, line_index = divmod(number - self.first, CHUNK)
        chunk = self._chunks[chunk_index]
        return self._source_names[chunk.sources[line_index]], chunk.line(line_index).decode(
            "utf-8", "replace"
        )

    def find_matches(
        self, pattern: re.Pattern[bytes], begin: int, end: int | None = None
    ) -> Iterator[list[int]]:
        """Yield the numbers of matching lines from ``begin`` on, one list per chunk.

        The lock is free during the search, so that lines can be added meanwhile.
        """
        while True:
            with self._lock:
                begin = max(begin, self.first)
                stop = self.total if end is None else min(end, self.total)
                if begin >= stop:
                    return
                chunk_index, line_index = divmod(begin - self.first, CHUNK)
                chunk = self._chunks[chunk_index]
                data = bytes(chunk.data)
                ends = chunk.ends[:]
                first_in_chunk = self.first + chunk_index * CHUNK
            line_numbers = [
                first_in_chunk + number for number in _find_matching_lines(pattern, data, ends, line_index)
            ]
            begin = first_in_chunk + len(ends)
            yield [number for number in line_numbers if number < stop]

    def find_last(self, pattern: re.Pattern[bytes], end: int, source: str = "") -> int | None:
        """Return the number of the last matching line before ``before``; an empty ``source`` means any."""
        while True:
            with self._lock:
                end = min(end, self.total)
                if end <= self.first:
                    return None
                chunk_index, line_index = divmod(end - 1 - self.first, CHUNK)
                chunk = self._chunks[chunk_index]
                data, ends, sources = bytes(chunk.data), chunk.ends[:], chunk.sources[:]
                first_in_chunk = self.first + chunk_index * CHUNK
                source_id = self._source_ids.get(source) if source else None
                if source and source_id is None:
                    return None
            line_indexes = [
                index
                for index in _find_matching_lines(pattern, data, ends, 0)
                if index <= line_index and (source_id is None or sources[index] == source_id)
            ]
            if line_indexes:
                return first_in_chunk + line_indexes[-1]
            end = first_in_chunk


def _find_matching_lines(
    pattern: re.Pattern[bytes], data: bytes, ends: Sequence[int], begin: int
) -> Iterator[int]:
    """Yield the indexes of matching lines; the pattern searches all lines of a chunk in one pass."""
    position = ends[begin - 1] if begin else 0
    while position < len(data):
        match = pattern.search(data, position)
        if match is None:
            return
        index = bisect_right(ends, match.start())
        if index >= len(ends):
            return
        start = ends[index - 1] if index else 0
        stop = ends[index] - 1
        # Ignore a match that spans the end of a line, but search that line alone.
        if match.end() <= stop or pattern.search(data[start:stop]):
            yield index
        position = ends[index]


def compile_pattern(text: str) -> re.Pattern[bytes]:
    """Compile a pattern that the user typed; it is case-sensitive only if it contains capitals.

    Raises:
        re.error: the text is not a regular expression.
    """
    flags = re.MULTILINE if text != text.lower() else re.MULTILINE | re.IGNORECASE
    return re.compile(text.encode("utf-8"), flags)
