"""Parse the times in log lines, and the times that users give as options."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

# 2026-11-21 16:30:24,123 | 2026-11-21T16:30:24.5+01:00 | I1121 16:30:24.123456 | [rank0]:[W1121 16:30:24.1
_ISO = re.compile(
    r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?(?![\d:])"
)
_GLOG = re.compile(r"(?:^|\[)[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})\b")
_SEARCHED_LENGTH = 120  # characters at the start of a line that are searched for a time
_DURATION_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def written_at(text: str, now: float, offset: int) -> float | None:
    """Return the time in a log line as seconds since the epoch, None if the line has no time.

    Args:
        now: seconds since the epoch; provides the year of times without a year.
        offset: the time zone of times without a zone, in seconds east of UTC.
    """
    try:
        return _parse_line_time(text[:_SEARCHED_LENGTH], now, offset)
    except (ValueError, OverflowError):  # an invalid time, such as month 13 or a zone 99 hours east
        return None


def _parse_line_time(line_start: str, now: float, offset: int) -> float | None:
    if match := _ISO.search(line_start):
        year, month, day, hour, minute, second = (int(match[index]) for index in range(1, 7))
        zone = _parse_zone(match[8], offset)
        fraction = float(f"0.{match[7]}") if match[7] else 0.0
    elif match := _GLOG.search(line_start):
        month, day, hour, minute, second = (int(match[index]) for index in range(1, 6))
        zone = timezone(timedelta(seconds=offset))
        year = datetime.fromtimestamp(now, zone).year
        fraction = float(f"0.{match[6]}")
    else:
        return None
    time = datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() + fraction
    # A time without a year that would be in the future, beyond wrong clocks, is of last year.
    return time if match.re is _ISO or time < now + 86400 * 2 else time - 365.25 * 86400


def _parse_zone(text: str | None, offset: int) -> timezone:
    if text is None:
        return timezone(timedelta(seconds=offset))
    if text == "Z":
        return timezone.utc
    sign = -1 if text[0] == "-" else 1
    return timezone(sign * timedelta(hours=int(text[1:3]), minutes=int(text[-2:])))


def point_in_time(text: str, now: float, offset: int) -> float:
    """Parse ``10m`` (ago), ``14:05``, ``2026-11-21 14:05`` or ``2026-11-21T14:05:09Z``.

    Returns:
        Seconds since the epoch.

    Raises:
        ValueError: ``text`` has none of these forms.
    """
    if match := _DURATION_AGO.fullmatch(text.strip()):
        return now - float(match[1]) * _SECONDS_PER_UNIT[match[2]]
    zone = timezone(timedelta(seconds=offset))
    today = datetime.fromtimestamp(now, zone)
    if match := re.fullmatch(r"(\d?\d):(\d\d)(?::(\d\d))?", text.strip()):
        hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
        return today.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
    time = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    return (time if time.tzinfo else time.replace(tzinfo=zone)).timestamp()
