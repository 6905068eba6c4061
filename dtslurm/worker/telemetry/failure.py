"""The first rank of an attempt that failed, with its exception and source line. Part of ``telemetry.py``."""

import os
import re
from typing import Any, Dict, List, Optional

from ..lib.rank_files import open_rank_log, read_record

TAIL = 65536  # bytes at the end of a log that are searched for the last exception
LONGEST = 300  # characters of an exception
WANTS_REQUEUE = 85
PREFIX = re.compile(r"^\[rank\d+\]: ?")
TRACEBACK = "Traceback (most recent call last)"
ERROR = re.compile(r"^([A-Za-z_][A-Za-z0-9_.]*(Error|Exception|Interrupt)|Exception)(: |$)")
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LIBRARY = re.compile(r"/(site-packages|dist-packages|lib(64)?/python\d[^/]*)/|^<")


def first_failure(logs: str, ranks: str) -> Optional[Dict[str, Any]]:
    """Return the rank that failed first with its exit code, exception and source line.

    None if no rank recorded a failure, or if the launcher or Slurm ended the first rank that did.
    """
    fields = first_words(ranks)
    if len(fields) != 2 or not all(word.isdigit() for word in fields) or int(fields[1]) in {0, WANTS_REQUEUE}:
        return None
    rank, code = map(int, fields)
    # Without the rank's record, the exit code is all that is known.
    if read_record(ranks, rank).get("told_to_end"):
        return None
    failure: Dict[str, Any] = {"rank": rank, "exit_code": code, "error": "", "file": "", "line": None}
    failure.update(last_exception(tail_lines(logs, rank)))
    return failure


def first_words(ranks: str) -> List[str]:
    """Return the rank and exit code in ``first-failure``, else in the earliest ``*.failure``."""
    failure_fields = text_of(os.path.join(ranks, "first-failure")).split()
    if failure_fields:
        return failure_fields
    try:
        names = [name for name in os.listdir(ranks) if re.match(r"^\d+\.failure$", name)]
    except OSError:
        return []
    failures = [text_of(os.path.join(ranks, name)).split() for name in names]
    dated_failures = [fields for fields in failures if len(fields) == 3 and fields[0].isdigit()]
    return min(dated_failures, key=lambda failure: int(failure[0]))[1:] if dated_failures else []


def text_of(path: str) -> str:
    """Return the first 200 bytes of a file as text, empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode("utf-8", "replace")
    except OSError:
        return ""


def tail_lines(logs: str, rank: int) -> List[str]:
    """Return the last lines of a rank's log without the prefix that torchrun adds."""
    try:
        file = open_rank_log(logs, rank)
    except OSError:
        return []
    try:
        text = file.read(TAIL, max(0, file.size() - TAIL)).decode("utf-8", "replace")
    except OSError:
        return []
    finally:
        file.close()
    return [PREFIX.sub("", line.rstrip("\r")) for line in text.split("\n")]


def last_exception(lines: List[str]) -> Dict[str, Any]:
    """Return the last exception of a log and the innermost line of user code in its traceback."""
    error_index = -1
    in_traceback = False
    for index, line in enumerate(lines):
        if line.startswith(TRACEBACK):
            in_traceback = True
        elif ERROR.match(line) or (in_traceback and line and not line[0].isspace()):
            error_index, in_traceback = (
                index,
                False,
            )  # the first line below the frames, whatever the exception's name
    if error_index < 0:
        return {}
    exception: Dict[str, Any] = {"error": lines[error_index][:LONGEST]}
    frames = []
    for line in reversed(lines[:error_index]):
        if line.startswith(TRACEBACK):
            break
        match = FRAME.match(line)
        if match is not None:
            frames.append((match.group(1), int(match.group(2))))
    user_frames = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    if user_frames:
        exception["file"], exception["line"] = user_frames[0]
    return exception
