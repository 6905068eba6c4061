"""When a line was written, by the time that stands in it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

# 2026-11-21 16:30:24,123 | 2026-11-21T16:30:24.5+01:00 | I1121 16:30:24.123456 | [rank0]:[W1121 16:30:24.1
_ISO = re.compile(
    r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?(?![\d:])"
)
_GLOG = re.compile(r"(?:^|\[)[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})\b")
_WITHIN = 120  # characters of a line in which its time stands
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def written_at(text: str, now: float, offset: int) -> float | None:
    """Return the time in a line as seconds since the epoch, None if there is none.

    Args:
        now: seconds since the epoch; gives the year to times without one.
        offset: seconds east of UTC of the clock that wrote times without a zone.
    """
    try:
        return _written_at(text[:_WITHIN], now, offset)
    except (ValueError, OverflowError):  # it looks like a time and is none: month 13, 99 hours east
        return None


def _written_at(start: str, now: float, offset: int) -> float | None:
    if found := _ISO.search(start):
        year, month, day, hour, minute, second = (int(found[index]) for index in range(1, 7))
        zone = _zone(found[8], offset)
        fraction = float(f"0.{found[7]}") if found[7] else 0.0
    elif found := _GLOG.search(start):
        month, day, hour, minute, second = (int(found[index]) for index in range(1, 6))
        zone = timezone(timedelta(seconds=offset))
        year = datetime.fromtimestamp(now, zone).year
        fraction = float(f"0.{found[6]}")
    else:
        return None
    time = datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() + fraction
    return time if found.re is _ISO or time < now + 86400 * 2 else time - 365.25 * 86400


def _zone(text: str | None, offset: int) -> timezone:
    if text is None:
        return timezone(timedelta(seconds=offset))
    if text == "Z":
        return timezone.utc
    sign = -1 if text[0] == "-" else 1
    return timezone(sign * timedelta(hours=int(text[1:3]), minutes=int(text[-2:])))


def point_in_time(text: str, now: float, offset: int) -> float:
    """Return what is meant by ``10m`` (ago), ``14:05``, ``2026-11-21 14:05`` or ``2026-11-21T14:05:09Z``.

    Raises:
        ValueError: it is none of these.
    """
    if found := _AGO.fullmatch(text.strip()):
        return now - float(found[1]) * _SECONDS[found[2]]
    zone = timezone(timedelta(seconds=offset))
    today = datetime.fromtimestamp(now, zone)
    if found := re.fullmatch(r"(\d?\d):(\d\d)(?::(\d\d))?", text.strip()):
        hour, minute, second = int(found[1]), int(found[2]), int(found[3] or 0)
        return today.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
    time = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    return (time if time.tzinfo else time.replace(tzinfo=zone)).timestamp()
