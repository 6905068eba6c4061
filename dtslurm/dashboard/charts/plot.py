"""Curves and bars drawn with Unicode characters; a braille character holds two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draw the points as a connected curve, scaled to ``height`` lines of ``width`` characters.

    Args:
        points: finite (x, y) pairs; points in the same column of dots are averaged.
    """
    return draw_scaled_curve(points, width, height)[0]


def draw_scaled_curve(
    points: Sequence[tuple[float, float]], width: int, height: int
) -> tuple[list[str], float, float]:
    """Return the lines of `curve` and the values at its lower and its upper edge."""
    low = high = 0.0
    if width < 1 or height < 1:
        return [], low, high
    grid = [[0] * width for _ in range(height)]
    columns = _average_columns(points, width * 2)
    values = [value for value in columns if value is not None]
    if values:
        low, high = min(values), max(values)
        span = high - low
        rows = height * 4
        previous_dot: tuple[int, int] | None = None
        for x, value in enumerate(columns):
            if value is None:
                continue
            share = (value - low) / span if span > 0 else 0.5
            y = min(rows - 1, max(0, round((1 - share) * (rows - 1))))
            if previous_dot is not None:
                _draw_line(grid, previous_dot, (x, y))
            _set_dot(grid, x, y)
            previous_dot = (x, y)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in grid], low, high


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Return the points with the exponential moving average of their values, starting at the first value.

    Args:
        weight: weight of the previous average; a new value has the weight ``1 - weight``.
    """
    smoothed: list[tuple[float, float]] = []
    for x, value in points:
        smoothed.append((x, weight * smoothed[-1][1] + (1 - weight) * value if smoothed else value))
    return smoothed


def take_logarithms(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points with the decimal logarithms of their values; drop values that are not positive."""
    return [(x, math.log10(value)) for x, value in points if value > 0]


def _average_columns(points: Sequence[tuple[float, float]], count: int) -> list[float | None]:
    """Return the mean of the values in each of ``count`` columns; None for an empty column."""
    if not points:
        return [None] * count
    begin = min(x for x, _ in points)
    span = max(x for x, _ in points) - begin
    sums, counts = [0.0] * count, [0] * count
    for x, y in points:
        column = min(count - 1, int((x - begin) / span * (count - 1))) if span > 0 else 0
        sums[column] += y
        counts[column] += 1
    return [total / number if number else None for total, number in zip(sums, counts, strict=True)]


def _set_dot(grid: list[list[int]], x: int, y: int) -> None:
    grid[y // 4][x // 2] |= _BRAILLE_BITS[y % 4][x % 2]


def _draw_line(grid: list[list[int]], begin: tuple[int, int], end: tuple[int, int]) -> None:
    (x0, y0), (x1, y1) = begin, end
    steps = max(x1 - x0, abs(y1 - y0))
    for step in range(1, steps):
        _set_dot(grid, x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps))


def draw_bar(share: float, width: int) -> str:
    """Return a bar of ``width`` characters, filled to ``share`` (0 to 1) in eighths and dotted beyond."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full_cells, remainder = divmod(eighths, 8)
    return ("█" * full_cells + (" ▏▎▍▌▋▊▉"[remainder] if remainder else "")).ljust(width, "·")[:width]
