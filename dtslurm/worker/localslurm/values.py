"""Values of sbatch options in Slurm's notations. Each reader raises ``ValueError`` for what is none."""

import re
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

MAX_ARRAY_INDEX = 10000
DEPENDENCY_KINDS = ("after", "afterok", "afterany", "afternotok", "singleton")

_MIB = {"K": 1 / 1024.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def count(text: str) -> int:
    """Read a positive whole number."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("{!r} is not a positive whole number".format(text))
    return int(text)


def node_count(text: str) -> int:
    """Read ``2`` or ``2-4``, of which the smaller is taken."""
    low, dash, high = text.partition("-")
    if dash and count(high) < count(low):
        raise ValueError("{!r} is not a number of nodes".format(text))
    return count(low)


def seconds(text: str) -> Optional[int]:
    """Read a time limit (``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH[:MM[:SS]]``); None means no limit."""
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
    """Read a memory size into MiB; 0 means all of a node's."""
    found = re.match(r"(\d+(?:\.\d+)?)([KMGTP]?)B?$", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError("{!r} is not a memory size; write for example 64G or 512000M".format(text))
    size = float(found.group(1)) * _MIB[(found.group(2) or "M").upper()]
    return max(1, round(size)) if size else 0


def gpu_count(text: str) -> int:
    """Read ``[TYPE:]N``."""
    return count(text.rpartition(":")[2])


def gres(text: str) -> int:
    """Read ``gpu[:TYPE][:N]`` into the number of GPUs; a machine has no other generic resources."""
    total = 0
    for part in text.split(","):
        words = part.strip().split(":")
        if words == ["none"]:
            continue
        if words[0] != "gpu":
            raise ValueError(
                "{!r}: this machine has no generic resource {!r}, only gpu".format(text, words[0])
            )
        total += count(words[-1]) if len(words) > 1 and words[-1].isdecimal() else 1
    return total


def signal_number(text: str) -> int:
    """Read ``USR1``, ``SIGUSR1`` or ``10``."""
    word = text.strip().upper()
    if word.isdecimal() and 0 < int(word) < signal.NSIG:
        return int(word)
    word = word if word.startswith("SIG") else "SIG" + word
    if word not in signal.Signals.__members__:
        raise ValueError("{!r} is not a signal".format(text))
    return int(signal.Signals[word])


def early_signal(text: str) -> Dict[str, Any]:
    """Read ``[B:]SIGNAL[@SECONDS]`` into ``number``, ``batch`` and ``before``."""
    found = re.match(r"(?:([BR]+):)?([^@]+)(?:@(\d+))?$", text.strip(), re.IGNORECASE)
    if not found or int(found.group(3) or 0) > 65535:
        raise ValueError("{!r} is not a signal; write for example USR1@120 or B:TERM@60".format(text))
    return {
        "number": signal_number(found.group(2)),
        "batch": "B" in (found.group(1) or "").upper(),
        "before": int(found.group(3) or 60),
    }


class Array(NamedTuple):
    """An array's task numbers in order, how many may run at once (0: all), and the step of its ranges."""

    tasks: List[int]
    limit: int
    step: int


def array(text: str) -> Array:
    """Read ``0-9:2,12%3``."""
    body, percent, limit = text.partition("%")
    if percent and not limit.isdecimal():
        raise ValueError("{!r} is not an array; write for example 0-9, 1,3,7 or 0-99%4".format(text))
    tasks: Set[int] = set()
    step = 1
    for part in body.split(","):
        found = re.match(r"(\d+)(?:-(\d+)(?::(\d+))?)?$", part.strip())
        if not found:
            raise ValueError("{!r} is not an array; write for example 0-9, 1,3,7 or 0-99%4".format(text))
        low, high = int(found.group(1)), int(found.group(2) or found.group(1))
        step = int(found.group(3) or 1)
        if high < low or step == 0:
            raise ValueError("{!r} is not an array: {} is empty".format(text, part.strip()))
        if high > MAX_ARRAY_INDEX:
            raise ValueError("{!r}: array indices here go up to {}".format(text, MAX_ARRAY_INDEX))
        tasks.update(range(low, high + 1, step))
    return Array(sorted(tasks), int(limit or 0), step)


def dependency(text: str) -> List[Tuple[str, str]]:
    """Read ``afterok:17:18_3,singleton`` into (kind, job id) pairs; a singleton has no id."""
    if "?" in text:
        raise ValueError("{!r}: the embedded scheduler does not offer '?' between dependencies".format(text))
    wanted = []
    for part in text.split(","):
        kind, _, ids = part.strip().partition(":")
        if kind not in DEPENDENCY_KINDS:
            known = ", ".join(DEPENDENCY_KINDS)
            raise ValueError("{!r}: the embedded scheduler offers the dependencies {}".format(text, known))
        if kind == "singleton":
            wanted.append((kind, ""))
            continue
        for job in ids.split(":"):
            if not re.match(r"\d+(_\d+)?$", job):
                raise ValueError("{!r}: {!r} is not a job id".format(text, job))
            wanted.append((kind, job))
    return wanted


def job_id(text: str) -> Tuple[int, Optional[int]]:
    """Read ``17`` or ``17_3``."""
    found = re.match(r"(\d+)(?:_(\d+))?$", text.strip())
    if not found:
        raise ValueError("{!r} is not a job id".format(text))
    return int(found.group(1)), None if found.group(2) is None else int(found.group(2))


def expand_name(pattern: str, fields: Dict[str, str]) -> str:
    """Replace ``%j`` and its kin in a file name, with ``%4t`` for zero padding; others stay as they are."""

    def value(found: "re.Match[str]") -> str:
        if found.group(2) == "%":
            return "%"
        if found.group(2) not in fields:
            return found.group(0)
        text = fields[found.group(2)]
        return text.zfill(min(int(found.group(1) or 0), 10)) if text.isdecimal() else text

    return re.sub(r"%(\d*)([A-Za-z%])", value, pattern)
