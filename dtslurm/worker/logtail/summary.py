"""Summaries of the ranks' output, for readers that monitor all ranks without reading each log."""

import json
from typing import Any, Dict, Iterator, List

from ..lib.rank_files import OpenLog
from .files import BLOCK, GrowingFile

SHOWN = 200  # maximum bytes of a line in a summary
FAR_BEHIND = 1 << 22  # bytes; older unread output is skipped
TOGETHER = 1000  # ranks per frame


class Summary:
    """A collection of one row per rank with new output."""

    def __init__(self, alarms: List[bytes]) -> None:
        self.alarms = alarms
        self.rows: Dict[int, List[Any]] = {}

    def take(self, log: GrowingFile, file: OpenLog, data: bytes) -> None:
        """Add new output to the log's row, and advance the log's offset."""
        row = self.rows.setdefault(log.stream, [log.stream, 0, 0, "", ""])
        unread_bytes = file.size() - log.offset
        if unread_bytes > FAR_BEHIND:
            log.offset += unread_bytes - BLOCK
            log.tail = b""
        else:
            log.take(data)
        last_line = data.rstrip(b"\r\n").rsplit(b"\n", 1)[-1].rpartition(b"\r")[2]
        row[1] = log.offset
        row[2] += data.count(b"\n")
        row[3] = last_line[-SHOWN:].decode("utf-8", "replace")
        row[4] = row[4] or alarm(data, self.alarms)

    def payloads(self) -> Iterator[bytes]:
        """Yield the collected rows as payloads of SUMMARY, and clear them."""
        rows = list(self.rows.values())
        self.rows = {}
        for start in range(0, len(rows), TOGETHER):
            yield json.dumps(rows[start : start + TOGETHER]).encode()


def alarm(data: bytes, words: List[bytes]) -> str:
    """Return the first line that contains one of the words, empty if there is none."""
    positions = [position for position in (data.find(word) for word in words) if position >= 0]
    if not positions:
        return ""
    line_start = data.rfind(b"\n", 0, min(positions)) + 1
    return data[line_start : line_start + SHOWN].split(b"\n")[0].decode("utf-8", "replace")
