"""New whole lines of files that grow, and the JSON objects on them: part of ``pulse.py``."""

import contextlib
import json
import math
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

MOST = 64 << 20  # bytes of new lines that are read at once; of more, the last ones
LINE = 1 << 20  # a line that is longer is not waited for


def entries(folder: str, pattern: str) -> Iterator[Tuple[str, str, int, float]]:
    """Yield (the pattern's group, path, size, mtime) of the files of a folder whose names match."""
    wanted = re.compile(pattern)
    try:
        listing = list(os.scandir(folder))
    except OSError:
        return
    for entry in listing:
        match = wanted.match(entry.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            status = entry.stat()
            yield str(int(match.group(1))), entry.path, status.st_size, status.st_mtime


def objects(lines: List[bytes]) -> Iterator[Dict[str, Any]]:
    """Yield the JSON objects of lines, leaving out what is not one."""
    for line in lines:
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def news(path: str, offset: Any, most: Optional[int]) -> Tuple[List[Dict[str, Any]], int]:
    """Return the objects on a file's whole lines behind ``offset``, and where the next look starts.

    A file that is shorter than ``offset`` is another one, and read from its start.
    """
    lines, after = new_lines(path, offset, MOST)
    records = list(objects(lines))
    return records[-most:] if most else records, after


def new_lines(path: str, offset: Any, most: int) -> Tuple[List[bytes], int]:
    """Return a file's whole lines behind ``offset``, the last ``most`` bytes of them, and where they end."""
    start = offset if isinstance(offset, int) and offset >= 0 else 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < start:
                start = 0
            first = max(start, size - most)
            file.seek(first)
            data = file.read(size - first)
    except OSError:
        return [], 0
    lines = data.split(b"\n")
    rest = lines.pop()
    if first > start and lines:
        del lines[0]  # it is cut off
    return lines, first + len(data) - (0 if len(rest) > LINE else len(rest))


def thinned(records: List[Dict[str, Any]], limit: int) -> List[Dict[str, Any]]:
    """Return at most about ``limit`` records: neighbours are merged, the newer value of a key wins.

    A value that is no number any more (a loss of NaN) is kept whatever comes after it in the same record.
    """
    if len(records) <= limit:
        return records
    kept = []
    for number in range(limit):
        merged: Dict[str, Any] = {}
        for record in records[number * len(records) // limit : (number + 1) * len(records) // limit]:
            merged.update((key, value) for key, value in record.items() if not broken(merged.get(key)))
        kept.append(merged)
    return kept


def broken(value: Any) -> bool:
    """Tell whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)
