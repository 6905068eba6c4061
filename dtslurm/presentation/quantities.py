"""Counts, sizes, durations, points in time and training metrics as text."""

from __future__ import annotations

from datetime import datetime, timezone

METRIC_LABELS = {
    "loss": "loss",
    "tokens_per_s": "tokens/s",
    "step_time_s": "step time, s",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "memory_gib": "memory of a GPU, GiB",
}


def pluralize(number: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 node`` or ``1,000 nodes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_short_number(value: float) -> str:
    """Format a number with four significant digits or thousands separators: ``12,340``, ``0.0213``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def format_precise_number(value: float | None, missing: str) -> str:
    """Format a metric with six significant digits; return ``missing`` for None."""
    return missing if value is None else f"{value:.6g}"


def format_any_value(value: object) -> str:
    """Format a value of any type; a floating-point number gets four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit: ``512 B``, ``31.0 MiB``, ``1.5 TiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_bytes_short(size: float) -> str:
    """Format a number of bytes in a few characters: ``512B``, ``1.5K``, ``17M``."""
    unit = "B"
    for larger_unit in "KMGT":
        if size < 1000:
            break
        size, unit = size / 1024, larger_unit
    return f"{size:.0f}{unit}" if size >= 10 or unit == "B" else f"{size:.1f}{unit}"


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units: ``45s``, ``12m03s``, ``2d04h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole_seconds = max(0, int(seconds))
    minutes, secs = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


def format_utc(time: float | None) -> str:
    """Format a time as date and time in UTC; empty for None."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if time else ""
