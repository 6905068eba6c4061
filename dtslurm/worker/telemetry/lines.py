"""New complete lines of growing files, and the JSON objects on them. Part of ``telemetry.py``."""

import contextlib
import math
import os
import re
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from ..lib.json_records import parse_lines
from ..lib.rank_files import OpenLog, PlainLog

MOST = 64 << 20  # bytes of new lines in one call; of more, the last ones
LINE = 1 << 20  # bytes after which an incomplete line is skipped


def entries(folder: str, pattern: str) -> Iterator[Tuple[str, str, int, float]]:
    """Yield (the pattern's group, path, size, mtime) of the files in a folder with matching names."""
    name_pattern = re.compile(pattern)
    try:
        listing = list(os.scandir(folder))
    except OSError:
        return
    for entry in listing:
        match = name_pattern.match(entry.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            status = entry.stat()
            yield str(int(match.group(1))), entry.path, status.st_size, status.st_mtime


def read_new_objects(path: str, offset: Any, max_bytes: Optional[int]) -> Tuple[List[Dict[str, Any]], int]:
    """Return the objects on a file's complete lines after ``offset``, and the offset for the next call.

    A file that is shorter than ``offset`` was replaced, and is read from its start.
    """
    lines, next_offset = read_new_lines(path, offset, MOST)
    records = list(parse_lines(lines))
    return records[-max_bytes:] if max_bytes else records, next_offset


def read_new_lines(path: str, offset: Any, max_bytes: int) -> Tuple[List[bytes], int]:
    """Return a file's complete lines after ``offset``, at most ``max_bytes``, and their end offset."""
    return read_new_lines_of(lambda: PlainLog(path), offset, max_bytes)[:2]


def read_new_lines_of(
    open_log: Callable[[], OpenLog], offset: Any, max_bytes: int
) -> Tuple[List[bytes], int, Optional[float]]:
    """Return a log's new lines as `read_new_lines` does, and when it was written (epoch seconds)."""
    start = offset if isinstance(offset, int) and offset >= 0 else 0
    try:
        file = open_log()
    except OSError:
        return [], 0, None
    try:
        size = file.size()
        if size < start:
            start = 0
        first = max(start, size - max_bytes)
        data = file.read(size - first, first)
        written = file.written()
    except OSError:
        return [], 0, None
    finally:
        file.close()
    lines = data.split(b"\n")
    incomplete = lines.pop()
    if first > start and lines:
        del lines[0]  # the first line is truncated
    return lines, first + len(data) - (0 if len(incomplete) > LINE else len(incomplete)), written


def thinned(records: List[Dict[str, Any]], limit: int) -> List[Dict[str, Any]]:
    """Return about ``limit`` records at most: neighbors are merged, and the newer value of a key wins.

    A value that is not finite (a loss of NaN) is kept, whatever comes after it in the same group.
    """
    if len(records) <= limit:
        return records
    merged_records = []
    for number in range(limit):
        merged: Dict[str, Any] = {}
        for record in records[number * len(records) // limit : (number + 1) * len(records) // limit]:
            merged.update((key, value) for key, value in record.items() if not broken(merged.get(key)))
        merged_records.append(merged)
    return merged_records


def broken(value: Any) -> bool:
    """Return whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)
