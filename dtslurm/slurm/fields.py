"""The columns that are requested from squeue and sacct, and the parser of each.

The parsers accept any text and never raise: a value that cannot be parsed is None, never a guess.
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
    """Return the printed value, or "" for Slurm's placeholders for no value (``(null)``, ``N/A``)."""
    value = value.strip()
    return "" if value in {"(null)", "N/A", "None assigned"} else value


def epoch(value: str) -> int | None:
    """Parse a time printed under ``SLURM_TIME_FORMAT=%s``; a date without a time zone gives None."""
    value = value.strip()
    return int(value) if value.isascii() and value.isdecimal() and 0 < int(value[:20]) < 2**40 else None


def seconds(value: str) -> int | None:
    """Parse a duration: ``1:46``, ``10:00:00``, ``1-02:03:04``; ``UNLIMITED`` and similar words give None."""
    match = _DURATION.fullmatch(value.strip())
    if not match:
        return None
    days, hours, minutes, secs = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


def count(value: str) -> int | None:
    """Parse a number: ``4``, ``2K`` (2048, as squeue abbreviates), the lower bound of ``1-4``."""
    match = _COUNT.fullmatch(value.strip())
    return int(float(match[1]) * _SCALE[match[2].upper()]) if match else None


def exit_code(value: str) -> tuple[int | None, int | None]:
    """Parse ``code:signal``; return (exit code, signal), of which at least one is None.

    A script that a signal ended has no exit code.
    """
    match = _EXIT.fullmatch(value.strip())
    if not match:
        return None, None
    code, sig = int(match[1]), int(match[2])
    return (None, sig) if sig else (code, None)


def has_value(value: str) -> bool:
    """Return whether Slurm printed a value, not a placeholder for its absence."""
    return value.strip().lower() not in _ABSENT


@dataclass(frozen=True)
class Field:
    """One column: how to request it and how to parse it.

    Attributes:
        name: the name of the column in dtslurm.
        squeue: squeue's format code, None if squeue does not have the column.
        sacct: sacct's column name, None if sacct does not have the column.
        read: the parser.
    """

    name: str
    squeue: str | None
    sacct: str | None
    read: Callable[[str], Any]


# Free text is last: a comment or name may contain any character, separators included.
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
    Field("restarts", None, "Restarts", count),  # in sacct since 24.11
    Field("partition", "%P", "Partition", text),
    Field("nodelist", "%N", "NodeList", text),
    Field("excluded", "%x", None, text),
    Field("reason", "%r", "Reason", text),
    Field("comment", "%k", "Comment", text),  # in sacct only if the site stores comments
    Field("name", "%j", "JobName", str),
)

SQUEUE = tuple(field for field in FIELDS if field.squeue)
SACCT = tuple(field for field in FIELDS if field.sacct)

# The columns of `squeue --steps`, and those of sacct for steps. In both, the name is the last one.
STEP_FORMAT = FIELD_END.join(("%i", "%U", "%S", "%N", "%P", "%j")) + RECORD_END
STEP_SACCT = ("JobID", "State", "ExitCode", "Start", "End", "NodeList", "JobName")

SQUEUE_FORMAT = FIELD_END.join(field.squeue or "" for field in SQUEUE) + RECORD_END
