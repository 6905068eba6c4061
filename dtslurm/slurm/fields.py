"""The one table of what is asked of squeue and sacct, and how each answer is read.

Every reader takes any text and never fails: what is not understood is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dtslurm.model.values import dataclass

FIELD_END = "\x1f"
RECORD_END = "\x1e"

_ABSENT = {
    "", "n/a", "none", "unknown", "unlimited", "invalid", "not_set", "infinite", "(null)", "none assigned",
    "partition_limit",
}  # fmt: skip
_DURATION = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})")
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMG]?)(?:-.*)?", re.IGNORECASE)
_SCALE = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_EXIT = re.compile(r"(\d{1,9}):(\d{1,9})")


def text(value: str) -> str:
    """Return what Slurm printed, with its words for "nothing" (``(null)``, ``N/A``) emptied."""
    value = value.strip()
    return "" if value in {"(null)", "N/A", "None assigned"} else value


def epoch(value: str) -> int | None:
    """Read a time printed under ``SLURM_TIME_FORMAT=%s``; a local date has no known zone and gives None."""
    value = value.strip()
    return int(value) if value.isascii() and value.isdecimal() and 0 < int(value[:20]) < 2**40 else None


def seconds(value: str) -> int | None:
    """Read a duration: ``1:46``, ``10:00:00``, ``1-02:03:04``; ``UNLIMITED`` and the like give None."""
    found = _DURATION.fullmatch(value.strip())
    if not found:
        return None
    days, hours, minutes, secs = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


def count(value: str) -> int | None:
    """Read a number: ``4``, ``2K`` (2048, squeue's own shortening), the lower end of ``1-4``."""
    found = _COUNT.fullmatch(value.strip())
    return int(float(found[1]) * _SCALE[found[2].upper()]) if found else None


def exit_code(value: str) -> tuple[int | None, int | None]:
    """Read ``code:signal``; a script ended by a signal has no exit code of its own."""
    found = _EXIT.fullmatch(value.strip())
    if not found:
        return None, None
    code, sig = int(found[1]), int(found[2])
    return (None, sig) if sig else (code, None)


def known(value: str) -> bool:
    """Whether Slurm printed a value at all, not a word for its absence."""
    return value.strip().lower() not in _ABSENT


@dataclass(frozen=True)
class Field:
    """One thing to ask for: ``name`` here, the squeue format code, the sacct column, the reader."""

    name: str
    squeue: str | None
    sacct: str | None
    read: Callable[[str], Any]


# Free text stands last: a comment or name may hold anything, separators included.
FIELDS = (
    Field("raw_id", "%A", "JobIDRaw", text),
    Field("job_id", "%i", "JobID", text),
    Field("uid", "%U", "UID", count),
    Field("raw_state", "%T", "State", text),
    Field("exit", None, "ExitCode", exit_code),
    Field("submit_time", "%V", "Submit", epoch),
    Field("start_time", "%S", "Start", epoch),
    Field("end_time", "%e", "End", epoch),
    Field("time_left", "%L", None, seconds),
    Field("nodes", "%D", "NNodes", count),
    Field("restarts", None, "Restarts", count),  # sacct has it from 24.11
    Field("partition", "%P", "Partition", text),
    Field("nodelist", "%N", "NodeList", text),
    Field("excluded", "%x", None, text),
    Field("reason", "%r", "Reason", text),
    Field("comment", "%k", "Comment", text),  # sacct: only where the site stores comments
    Field("name", "%j", "JobName", str),
)

SQUEUE = tuple(field for field in FIELDS if field.squeue)
SACCT = tuple(field for field in FIELDS if field.sacct)

SQUEUE_FORMAT = FIELD_END.join(field.squeue or "" for field in SQUEUE) + RECORD_END
