"""The lines of a log: read where needed, shortened, dated; whether training went on behind one."""

import os
import re
import time
from typing import Dict, List, Optional, Set, Tuple

SHOWN = 400  # characters of one line that travel
PREFIX = re.compile(rb"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
STAMP = re.compile(r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")
GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)")
DIGITS = re.compile(rb"[0-9]+")
NO_PROGRESS = re.compile(rb"(?i)error|fail|warn|nccl|frame |file \"|traceback|exception|c10d|processgroup")

Candidate = Tuple[int, int, bytes]  # line number, byte offset of the line, the line


class Lines:
    """Lines of one file by byte offset, read as they are asked for."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115 - closed by the caller
        self.size = os.fstat(self.file.fileno()).st_size

    def around(self, start: int, count: int) -> List[bytes]:
        """Return the whole lines in ``count`` bytes from ``start``, progress bars taken apart."""
        self.file.seek(max(0, start))
        return self.file.read(count).replace(b"\r", b"\n").split(b"\n")


def last_lines(lines: Lines, count: int = 4) -> List[str]:
    """Return the last lines that say anything."""
    texts = [show(line) for line in lines.around(lines.size - 4096, 4096)]
    return [text for text in texts if text.strip()][-count:]


def show(line: bytes) -> str:
    """Return a line as text, cut off where it is long."""
    return line[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]


def training_went_on(lines: Lines, start: int, end: int) -> bool:
    """Tell whether a log goes on after a place as before it: lines that differ in their numbers only."""
    after = [line for line in lines.around(end, 32768)[:-1] if line.strip() and not NO_PROGRESS.search(line)]
    if len(after) < 3:
        return False
    above = b"\n".join(lines.around(start - 8192, min(8192, start))[1:])
    before = {line for line in DIGITS.sub(b"#", above).split(b"\n") if line.strip()}
    again = 0
    seen: Dict[bytes, Set[bytes]] = {}
    for line in after:
        masked = DIGITS.sub(b"#", line)
        again += masked in before
        if masked != line:
            seen.setdefault(masked, set()).add(line)
    return again >= 3 or any(len(texts) >= 5 for texts in seen.values())


def stamp(text: str, written: float) -> Optional[float]:
    """Return the time that a line carries, by this machine's time zone, None where it carries none."""
    found = STAMP.search(text)
    if found:
        values = [int(value) for value in found.groups()]
    else:
        found = GLOG.search(text)
        if not found:
            return None
        values = [time.localtime(written).tm_year, *(int(value) for value in found.groups())]
    try:
        return time.mktime((*values, 0, 0, -1))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
