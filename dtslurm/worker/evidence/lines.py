"""Lines of a log: random access, time stamps, and whether training continued after a line."""

import os
import re
import time
from typing import Dict, List, Optional, Set, Tuple

SHOWN = 400  # characters of one line that are returned
PREFIX = re.compile(rb"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
STAMP = re.compile(r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")
GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)")
DIGITS = re.compile(rb"[0-9]+")
NO_PROGRESS = re.compile(rb"(?i)error|fail|warn|nccl|frame |file \"|traceback|exception|c10d|processgroup")

Candidate = Tuple[int, int, bytes]  # line number, byte offset of the line, the line


class Lines:
    """Random access to the lines of one file by byte offset."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115 - closed by the caller
        self.size = os.fstat(self.file.fileno()).st_size

    def around(self, start: int, count: int) -> List[bytes]:
        """Return the whole lines in ``count`` bytes from ``start``, with progress bars split into lines."""
        self.file.seek(max(0, start))
        return self.file.read(count).replace(b"\r", b"\n").split(b"\n")


def last_lines(lines: Lines, count: int = 4) -> List[str]:
    """Return the last lines that are not blank."""
    texts = [show(line) for line in lines.around(lines.size - 4096, 4096)]
    return [text for text in texts if text.strip()][-count:]


def show(line: bytes) -> str:
    """Return a line as text, truncated to `SHOWN` characters."""
    return line[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]


def training_went_on(lines: Lines, start: int, end: int) -> bool:
    """Return whether the lines after a position resemble those before it except for their numbers."""
    lines_after = [
        line for line in lines.around(end, 32768)[:-1] if line.strip() and not NO_PROGRESS.search(line)
    ]
    if len(lines_after) < 3:
        return False
    text_before = b"\n".join(lines.around(start - 8192, min(8192, start))[1:])
    masked_before = {line for line in DIGITS.sub(b"#", text_before).split(b"\n") if line.strip()}
    repeated = 0
    lines_by_mask: Dict[bytes, Set[bytes]] = {}
    for line in lines_after:
        masked = DIGITS.sub(b"#", line)
        repeated += masked in masked_before
        if masked != line:
            lines_by_mask.setdefault(masked, set()).add(line)
    return repeated >= 3 or any(len(texts) >= 5 for texts in lines_by_mask.values())


def stamp(text: str, last_write: float) -> Optional[float]:
    """Return the time in a line, in this machine's time zone; None without a time stamp."""
    match = STAMP.search(text)
    if match:
        values = [int(value) for value in match.groups()]
    else:
        match = GLOG.search(text)
        if not match:
            return None
        values = [time.localtime(last_write).tm_year, *(int(value) for value in match.groups())]
    try:
        return time.mktime((*values, 0, 0, -1))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
