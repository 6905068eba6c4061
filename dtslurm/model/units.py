"""Time limits and memory sizes in Slurm's notations."""

from __future__ import annotations

import re
import time

from dtslurm.model.values import dataclass

LARGEST_SKEW_S = 300.0  # munge rejects credentials of hosts whose clocks differ by more (its TTL)
_SLURM_TIME = re.compile(  # [0-9]: \d would accept Unicode digits, Slurm does not
    r"(?:(?P<days>[0-9]+)-(?P<day_hours>[0-9]+)(?::(?P<day_minutes>[0-9]+)(?::(?P<day_seconds>[0-9]+))?)?)"
    r"|(?:(?P<hours>[0-9]+):(?P<hour_minutes>[0-9]+):(?P<hour_seconds>[0-9]+))"
    r"|(?:(?P<minutes>[0-9]+)(?::(?P<minute_seconds>[0-9]+))?)"
)
_UNIT_TIME = re.compile(r"(?=[0-9])(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?", re.IGNORECASE)
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(?:i?B)?)?", re.IGNORECASE)
_MIB_PER_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
_RELATIVE_TIME = re.compile(r"([0-9]{1,4})([hdw])")
_SECONDS_PER_UNIT = {"h": 3600, "d": 86400, "w": 7 * 86400}
_UNLIMITED = {"unlimited", "infinite", "-1"}


@dataclass(frozen=True, order=True)
class Walltime:
    """A time limit in whole seconds, always positive. An optional limit that is None means no limit."""

    seconds: int

    @classmethod
    def parse(cls, text: str) -> Walltime:
        """Parse Slurm's notations (``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH[:MM[:SS]]``) or ``2d3h30m``.

        Raises:
            ValueError: the text is in neither notation, or is zero or negative.
        """
        text = text.strip()
        match = _SLURM_TIME.fullmatch(text)
        if match:
            fields = {name: int(value) for name, value in match.groupdict(default="0").items()}
            seconds = (
                fields["days"] * 86400
                + (fields["day_hours"] + fields["hours"]) * 3600
                + (fields["day_minutes"] + fields["hour_minutes"] + fields["minutes"]) * 60
                + fields["day_seconds"]
                + fields["hour_seconds"]
                + fields["minute_seconds"]
            )
        else:
            unit_match = _UNIT_TIME.fullmatch(text)
            if not unit_match:
                raise ValueError(
                    f"{text!r} is not a duration; write minutes, HH:MM:SS, D-HH:MM:SS or a form like 2h30m"
                )
            days, hours, minutes, secs = (int(value or 0) for value in unit_match.groups())
            seconds = days * 86400 + hours * 3600 + minutes * 60 + secs
        if seconds <= 0:
            raise ValueError(f"{text!r} is a duration of 0; it must be more than 0")
        return cls(seconds)

    @classmethod
    def parse_limit(cls, text: str) -> Walltime | None:
        """Parse a limit as Slurm prints it; ``UNLIMITED`` and ``INFINITE`` give None."""
        return None if text.strip().lower() in _UNLIMITED else cls.parse(text)

    def __str__(self) -> str:
        """Return the form Slurm prints: ``[D-]HH:MM:SS``."""
        days, remainder = divmod(self.seconds, 86400)
        hours, remainder = divmod(remainder, 3600)
        minutes, seconds = divmod(remainder, 60)
        clock = f"{hours:02}:{minutes:02}:{seconds:02}"
        return f"{days}-{clock}" if days else clock


@dataclass(frozen=True, order=True)
class Memory:
    """An amount of memory in MiB, Slurm's unit; 0 means all of a node's memory, as in ``--mem=0``."""

    mib: int

    @classmethod
    def parse(cls, text: str) -> Memory:
        """Parse ``480G``, ``494000M``, ``1.5T`` or a plain number of MiB, as Slurm does (powers of 1024).

        Raises:
            ValueError: the text is not a size.
        """
        match = _MEMORY.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text!r} is not a memory size; write for example 64G, 512000M or 1.5T")
        amount, unit = float(match[1]), (match[2] or "M").upper()
        mib = amount * _MIB_PER_UNIT[unit]
        return cls(int(mib) if mib == 0 else max(1, round(mib)))

    def __str__(self) -> str:
        """Return the shortest exact form: ``512G``, ``494000M``, ``0``."""
        if self.mib == 0:
            return "0"
        for unit in ("T", "G"):
            size = int(_MIB_PER_UNIT[unit])
            if self.mib % size == 0:
                return f"{self.mib // size}{unit}"
        return f"{self.mib}M"

    @property
    def gib(self) -> float:
        """The same amount in GiB."""
        return self.mib / 1024


def parse_past_time(text: str, now: float) -> float:
    """Return the time that a text names: ``12h``, ``2d`` or ``8w`` before ``now``, or a date, 2026-01-31.

    Args:
        now: seconds since the epoch.

    Raises:
        ValueError: the text is neither.
    """
    match = _RELATIVE_TIME.fullmatch(text)
    if match is not None:
        return now - int(match[1]) * _SECONDS_PER_UNIT[match[2]]
    return time.mktime(time.strptime(text, "%Y-%m-%d"))
