"""Loss and throughput, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widget import Widget

from dtslurm.dashboard import look
from dtslurm.dashboard.plot import curve
from dtslurm.dashboard.rows import clipped
from dtslurm.dashboard.words import short

Curve = tuple[str, list[tuple[float, float]]]
_AXIS = 8
_LEAST = 30  # columns of a plot


class Curves(Widget):
    """Plots that share the width."""

    DEFAULT_CSS = "Curves { height: 8; }"

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._curves: Sequence[Curve] = ()
        self.empty = "loading …"

    @property
    def most(self) -> int:
        """How many plots have room."""
        return max(1, min(4, self.size.width // _LEAST))

    def show(self, curves: Sequence[Curve]) -> None:
        """Draw these."""
        self._curves = curves
        self.refresh()

    def render(self) -> Text:
        width, height = self.size
        if not self._curves:
            hint = (
                ": dtslurm reads $DTSLURM_METRICS and common log lines"
                if self.empty.startswith("no ")
                else ""
            )
            return Text(
                self.empty + hint, style=look.style(self.app, "dim"), no_wrap=True, overflow="ellipsis"
            )
        shown = self._curves[: self.most]
        each = max(4, width // len(shown) - 1)
        blocks = [plot(title, points, each, height) for title, points in shown]
        text = Text(no_wrap=True)
        accent, dim = look.style(self.app, "accent"), look.style(self.app, "dim")
        for row in range(height):
            for number, block in enumerate(blocks):
                label, dots = block[row]
                text.append(" " if number else "")
                text.append(label, style="bold" if row == 0 else dim)
                text.append(dots, style=accent)
            text.append("\n" if row < height - 1 else "")
        return text


def plot(title: str, points: Sequence[tuple[float, float]], width: int, height: int) -> list[tuple[str, str]]:
    """Return the lines of one plot as (label, dots): the title, then the curve beside its axis."""
    lines = [(clipped(title, width), "")]
    axis = _AXIS if width > 3 * _AXIS else 0
    dots = curve(points, width - axis, max(0, height - 1))
    values = [value for _, value in points]
    for row, line in enumerate(dots):
        label = ""
        if axis and row in {0, len(dots) - 1} and values:
            label = short(max(values) if row == 0 else min(values))
        lines.append((f"{label:>{axis - 1}} " if axis else "", line))
    return lines[:height]
