"""How a cost grows with a size: the exponent of the power that fits best, and a picture of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 430, 330, 56, 44, 96


@dataclass(frozen=True)
class Curve:
    """Seconds (or another cost) at each size."""

    name: str
    points: tuple[tuple[int, float], ...]

    @property
    def exponent(self) -> float | None:
        """Return the k of the cost ~ size^k that fits the last decade of sizes best; None without one."""
        most = self.points[-1][0] if self.points else 0
        points = [(math.log(x), math.log(y)) for x, y in self.points if x * 10 >= most and y > 0]
        if len(points) < 2:
            return None
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def picture(panels: Sequence[tuple[str, Sequence[Curve]]]) -> str:
    """Return an SVG with one panel of curves beside the other, both axes by powers of ten."""
    parts = []
    for number, (title, curves) in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH},0)">{_panel(title, curves)}</g>')
    width = WIDTH * len(panels)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(title: str, curves: Sequence[Curve]) -> str:
    points = [point for curve in curves for point in curve.points if point[1] > 0]
    low_x, high_x = _decades([x for x, _ in points])
    low_y, high_y = _decades([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / max(1, high_x - low_x)
        up = (math.log10(y) - low_y) / max(1, high_y - low_y)
        return LEFT + across * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for power in range(low_x, high_x + 1):
        x, y = at(10**power, 10**low_y)
        parts.append(f'<text x="{x:.0f}" y="{y + 15:.0f}" text-anchor="middle">{10**power:,}</text>')
    for power in range(low_y, high_y + 1):
        x, y = at(10**low_x, 10.0**power)
        parts.append(f'<line x1="{x}" y1="{y:.0f}" x2="{WIDTH - 20}" y2="{y:.0f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve.points if y > 0)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        grows = "" if curve.exponent is None else f" ~ n^{curve.exponent:.2f}"
        y = HEIGHT - BOTTOM + 34 + 15 * number
        parts.append(f'<text x="{LEFT}" y="{y}" fill="{colour}">{escape(curve.name + grows)}</text>')
    return "\n".join(parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten that hold all values."""
    if not values:
        return 0, 1
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
