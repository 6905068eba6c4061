"""Curves made of braille dots: two by four to a character."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Return ``height`` lines of ``width`` characters with the points drawn, connected, scaled to fit.

    Args:
        points: finite (x, y) pairs; of several in one column of dots, the mean is drawn.
    """
    return scaled_curve(points, width, height)[0]


def scaled_curve(
    points: Sequence[tuple[float, float]], width: int, height: int
) -> tuple[list[str], float, float]:
    """Return the lines of `curve` and the values at their lower and upper edge."""
    low = high = 0.0
    if width < 1 or height < 1:
        return [], low, high
    grid = [[0] * width for _ in range(height)]
    columns = _columns(points, width * 2)
    known = [value for value in columns if value is not None]
    if known:
        low, high = min(known), max(known)
        span = high - low
        rows = height * 4
        before: tuple[int, int] | None = None
        for x, value in enumerate(columns):
            if value is None:
                continue
            share = (value - low) / span if span > 0 else 0.5
            y = min(rows - 1, max(0, round((1 - share) * (rows - 1))))
            if before is not None:
                _line(grid, before, (x, y))
            _dot(grid, x, y)
            before = (x, y)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in grid], low, high


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Return the points with the exponential moving average of the values; it starts at the first value.

    Args:
        weight: of the average so far; the new value has the rest.
    """
    found: list[tuple[float, float]] = []
    for x, value in points:
        found.append((x, weight * found[-1][1] + (1 - weight) * value if found else value))
    return found


def logarithms(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points with the decimal logarithms of the values, without values that have none."""
    return [(x, math.log10(value)) for x, value in points if value > 0]


def _columns(points: Sequence[tuple[float, float]], count: int) -> list[float | None]:
    """Return the mean of the values that fall into each of so many columns."""
    if not points:
        return [None] * count
    begin = min(x for x, _ in points)
    span = max(x for x, _ in points) - begin
    sums, many = [0.0] * count, [0] * count
    for x, y in points:
        at = min(count - 1, int((x - begin) / span * (count - 1))) if span > 0 else 0
        sums[at] += y
        many[at] += 1
    return [total / number if number else None for total, number in zip(sums, many, strict=True)]


def _dot(grid: list[list[int]], x: int, y: int) -> None:
    grid[y // 4][x // 2] |= _DOTS[y % 4][x % 2]


def _line(grid: list[list[int]], begin: tuple[int, int], end: tuple[int, int]) -> None:
    (x0, y0), (x1, y1) = begin, end
    steps = max(x1 - x0, abs(y1 - y0))
    for step in range(1, steps):
        _dot(grid, x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps))


def bar(share: float, width: int) -> str:
    """Return a bar of ``width`` characters filled to ``share`` (0 to 1), in eighths; the rest is dotted."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width, "·")[:width]
