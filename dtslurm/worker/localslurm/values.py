"""Parsers for values of sbatch options in Slurm's notations.

Each raises ``ValueError`` for an invalid value.
"""

import re
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

MAX_ARRAY_INDEX = 10000
DEPENDENCY_KINDS = ("after", "afterok", "afterany", "afternotok", "singleton")

_MIB = {"K": 1 / 1024.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("{!r} is not a positive whole number".format(text))
    return int(text)


def node_count(text: str) -> int:
    """Parse ``2`` or ``2-4``; return the minimum of a range."""
    low, dash, high = text.partition("-")
    if dash and count(high) < count(low):
        raise ValueError("{!r} is not a number of nodes".format(text))
    return count(low)


def seconds(text: str) -> Optional[int]:
    """Parse a time limit (``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH[:MM[:SS]]``) into seconds.

    None means no limit.
    """
    text = text.strip()
    if text.lower() in ("unlimited", "infinite", "-1", "0"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if (dash and not days.isdecimal()) or len(parts) > 3 or not all(part.isdecimal() for part in parts):
        raise ValueError("{!r} is not a time limit; write minutes, HH:MM:SS or D-HH:MM:SS".format(text))
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        numbers += [0] * (3 - len(numbers))
    else:
        numbers = [0] + numbers + [0] * (2 - len(numbers))
    return (int(days or 0) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]) or None


def memory(text: str) -> int:
    """Parse a memory size into MiB; 0 means all memory of a node."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMGTP]?)B?$", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError("{!r} is not a memory size; write for example 64G or 512000M".format(text))
    size = float(match.group(1)) * _MIB[(match.group(2) or "M").upper()]
    return max(1, round(size)) if size else 0


def gpu_count(text: str) -> int:
    """Parse ``[TYPE:]N``."""
    return count(text.rpartition(":")[2])


def gres(text: str) -> int:
    """Parse ``gpu[:TYPE][:N]`` into the number of GPUs; the local machine has no other generic resources."""
    total = 0
    for part in text.split(","):
        fields = part.strip().split(":")
        if fields == ["none"]:
            continue
        if fields[0] != "gpu":
            raise ValueError(
                "{!r}: this machine has no generic resource {!r}, only gpu".format(text, fields[0])
            )
        total += count(fields[-1]) if len(fields) > 1 and fields[-1].isdecimal() else 1
    return total


def signal_number(text: str) -> int:
    """Parse ``USR1``, ``SIGUSR1`` or ``10``."""
    word = text.strip().upper()
    if word.isdecimal() and 0 < int(word) < signal.NSIG:
        return int(word)
    word = word if word.startswith("SIG") else "SIG" + word
    if word not in signal.Signals.__members__:
        raise ValueError("{!r} is not a signal".format(text))
    return int(signal.Signals[word])


def early_signal(text: str) -> Dict[str, Any]:
    """Parse ``[B:]SIGNAL[@SECONDS]`` into ``number``, ``batch`` and ``before``."""
    match = re.match(r"(?:([BR]+):)?([^@]+)(?:@(\d+))?$", text.strip(), re.IGNORECASE)
    if not match or int(match.group(3) or 0) > 65535:
        raise ValueError("{!r} is not a signal; write for example USR1@120 or B:TERM@60".format(text))
    return {
        "number": signal_number(match.group(2)),
        "batch": "B" in (match.group(1) or "").upper(),
        "before": int(match.group(3) or 60),
    }


class Array(NamedTuple):
    """An array's task ids in order, its limit of running tasks (0: none), and the step of its ranges."""

    tasks: List[int]
    limit: int
    step: int


def array(text: str) -> Array:
    """Parse ``0-9:2,12%3``."""
    body, percent, limit = text.partition("%")
    if percent and not limit.isdecimal():
        raise ValueError("{!r} is not an array; write for example 0-9, 1,3,7 or 0-99%4".format(text))
    tasks: Set[int] = set()
    step = 1
    for part in body.split(","):
        match = re.match(r"(\d+)(?:-(\d+)(?::(\d+))?)?$", part.strip())
        if not match:
            raise ValueError("{!r} is not an array; write for example 0-9, 1,3,7 or 0-99%4".format(text))
        low, high = int(match.group(1)), int(match.group(2) or match.group(1))
        step = int(match.group(3) or 1)
        if high < low or step == 0:
            raise ValueError("{!r} is not an array: {} is empty".format(text, part.strip()))
        if high > MAX_ARRAY_INDEX:
            raise ValueError("{!r}: array indices here go up to {}".format(text, MAX_ARRAY_INDEX))
        tasks.update(range(low, high + 1, step))
    return Array(sorted(tasks), int(limit or 0), step)


def dependency(text: str) -> List[Tuple[str, str]]:
    """Parse ``afterok:17:18_3,singleton`` into (kind, job id) pairs; the job id of a singleton is empty."""
    if "?" in text:
        raise ValueError("{!r}: the embedded scheduler does not offer '?' between dependencies".format(text))
    dependencies = []
    for part in text.split(","):
        kind, _, ids = part.strip().partition(":")
        if kind not in DEPENDENCY_KINDS:
            kinds = ", ".join(DEPENDENCY_KINDS)
            raise ValueError("{!r}: the embedded scheduler offers the dependencies {}".format(text, kinds))
        if kind == "singleton":
            dependencies.append((kind, ""))
            continue
        for job in ids.split(":"):
            if not re.match(r"\d+(_\d+)?$", job):
                raise ValueError("{!r}: {!r} is not a job id".format(text, job))
            dependencies.append((kind, job))
    return dependencies


def job_id(text: str) -> Tuple[int, Optional[int]]:
    """Parse ``17`` or ``17_3`` into the job id and the array task id."""
    match = re.match(r"(\d+)(?:_(\d+))?$", text.strip())
    if not match:
        raise ValueError("{!r} is not a job id".format(text))
    return int(match.group(1)), None if match.group(2) is None else int(match.group(2))


def expand_name(pattern: str, fields: Dict[str, str]) -> str:
    """Replace ``%j`` and similar fields in a file name; ``%4t`` pads with zeros; unknown fields are kept."""

    def replacement(match: "re.Match[str]") -> str:
        if match.group(2) == "%":
            return "%"
        if match.group(2) not in fields:
            return match.group(0)
        text = fields[match.group(2)]
        return text.zfill(min(int(match.group(1) or 0), 10)) if text.isdecimal() else text

    return re.sub(r"%(\d*)([A-Za-z%])", replacement, pattern)
