"""Which rank of an attempt failed first, with which exception and where: part of ``pulse.py``."""

import json
import os
import re
from typing import Any, Dict, List, Optional

TAIL = 65536  # bytes of a log in which its last exception is looked for
LONGEST = 300  # characters of an exception
WANTS_REQUEUE = 85
PREFIX = re.compile(r"^\[rank\d+\]: ?")
TRACEBACK = "Traceback (most recent call last)"
ERROR = re.compile(r"^([A-Za-z_][A-Za-z0-9_.]*(Error|Exception|Interrupt)|Exception)(: |$)")
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LIBRARY = re.compile(r"/(site-packages|dist-packages|lib(64)?/python\d[^/]*)/|^<")


def first_failure(logs: str, ranks: str) -> Optional[Dict[str, Any]]:
    """Return the rank that failed first with its exit code, exception and place in the code.

    None if no rank recorded a failure, or if the first one was ended by its launcher or by Slurm.
    """
    words = first_words(ranks)
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) in {0, WANTS_REQUEUE}:
        return None
    rank, code = map(int, words)
    try:
        with open(os.path.join(ranks, "{}.json".format(rank)), "rb") as file:
            if json.loads(file.read().decode("utf-8", "replace")).get("told_to_end"):
                return None
    except (OSError, ValueError, AttributeError):
        pass  # without its record, the exit code is all that is known
    found: Dict[str, Any] = {"rank": rank, "exit_code": code, "error": "", "file": "", "line": None}
    found.update(last_exception(tail_lines(os.path.join(logs, "rank-{}.log".format(rank)))))
    return found


def first_words(ranks: str) -> List[str]:
    """Return the rank and exit code of ``first-failure``, or else of the earliest ``*.failure``."""
    words = text_of(os.path.join(ranks, "first-failure")).split()
    if words:
        return words
    try:
        names = [name for name in os.listdir(ranks) if re.match(r"^\d+\.failure$", name)]
    except OSError:
        return []
    failures = [text_of(os.path.join(ranks, name)).split() for name in names]
    times = [one for one in failures if len(one) == 3 and one[0].isdigit()]
    return min(times, key=lambda one: int(one[0]))[1:] if times else []


def text_of(path: str) -> str:
    """Return the beginning of a small file, empty where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(200).decode("utf-8", "replace")
    except OSError:
        return ""


def tail_lines(path: str) -> List[str]:
    """Return the last lines of a log without the prefix that torchrun writes."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            text = file.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return []
    return [PREFIX.sub("", line.rstrip("\r")) for line in text.split("\n")]


def last_exception(lines: List[str]) -> Dict[str, Any]:
    """Return the last exception of a log and the innermost line of the user's own code in its traceback."""
    last = -1
    in_traceback = False
    for number, line in enumerate(lines):
        if line.startswith(TRACEBACK):
            in_traceback = True
        elif ERROR.match(line) or (in_traceback and line and not line[0].isspace()):
            last, in_traceback = (
                number,
                False,
            )  # the first line below the frames, whatever the exception's name
    if last < 0:
        return {}
    found: Dict[str, Any] = {"error": lines[last][:LONGEST]}
    frames = []
    for line in reversed(lines[:last]):
        if line.startswith(TRACEBACK):
            break
        match = FRAME.match(line)
        if match is not None:
            frames.append((match.group(1), int(match.group(2))))
    own = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    if own:
        found["file"], found["line"] = own[0]
    return found
