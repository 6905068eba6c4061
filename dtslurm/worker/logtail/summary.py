"""What the output of ranks amounts to, for those who look at all of them and read none."""

import json
import os
from typing import Any, Dict, Iterator, List

from .files import BLOCK, GrowingFile

SHOWN = 200  # bytes of a line
FAR_BEHIND = 1 << 22  # what lies further back than this is not read
TOGETHER = 1000  # ranks to a frame


class Summary:
    """Collects a row for each rank that wrote something."""

    def __init__(self, alarms: List[bytes]) -> None:
        self.alarms = alarms
        self.rows: Dict[int, List[Any]] = {}

    def take(self, log: GrowingFile, fd: int, data: bytes) -> None:
        """Note new output, and count it as read."""
        row = self.rows.setdefault(log.stream, [log.stream, 0, 0, "", ""])
        behind = os.fstat(fd).st_size - log.offset
        if behind > FAR_BEHIND:
            log.offset += behind - BLOCK
            log.tail = b""
        else:
            log.take(data)
        last = data.rstrip(b"\r\n").rsplit(b"\n", 1)[-1].rpartition(b"\r")[2]
        row[1] = log.offset
        row[2] += data.count(b"\n")
        row[3] = last[-SHOWN:].decode("utf-8", "replace")
        row[4] = row[4] or alarm(data, self.alarms)

    def payloads(self) -> Iterator[bytes]:
        """Yield what was noted, as payloads of SUMMARY, and forget it."""
        rows = list(self.rows.values())
        self.rows = {}
        for start in range(0, len(rows), TOGETHER):
            yield json.dumps(rows[start : start + TOGETHER]).encode()


def alarm(data: bytes, words: List[bytes]) -> str:
    """Return the first line that holds one of the words, empty if none does."""
    places = [at for at in (data.find(word) for word in words) if at >= 0]
    if not places:
        return ""
    begin = data.rfind(b"\n", 0, min(places)) + 1
    return data[begin : begin + SHOWN].split(b"\n")[0].decode("utf-8", "replace")
