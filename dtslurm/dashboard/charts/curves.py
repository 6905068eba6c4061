"""Loss and throughput, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widget import Widget

from dtslurm.dashboard import theme
from dtslurm.dashboard.charts.plot import logarithms, scaled_curve, smooth
from dtslurm.dashboard.rows import clipped
from dtslurm.dashboard.words import short

Curve = tuple[str, list[tuple[float, float]]]
_AXIS = 8
_LEAST_HEIGHT = 6  # lines of a plot with steps below it
RESTARTS = "step, ┊ restarts"
_LEAST = 30  # columns of a plot


class Curves(Widget):
    """Plots that share the width."""

    DEFAULT_CSS = """
    Curves { height: 8; }
    Curves.-maximized { height: 1fr !important; max-height: 100% !important; }
    """
    ALLOW_MAXIMIZE = True

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._curves: Sequence[Curve] = ()
        self._marks: Sequence[float] = ()
        self.empty = "loading …"
        self.is_smooth = False
        self.is_logarithmic = False

    @property
    def most(self) -> int:
        """How many plots have room."""
        return max(1, min(4, self.size.width // _LEAST))

    def show(self, curves: Sequence[Curve], marks: Sequence[float] = ()) -> None:
        """Draw these, with a line at each of the steps ``marks``, where attempts began."""
        self._curves, self._marks = curves, marks
        self.refresh()

    def _plot(self, curve: Curve, width: int, height: int) -> list[tuple[str, str]]:
        """Return the lines of one curve, smooth and on a logarithmic scale where a key chose that."""
        title, points = curve
        if self.is_smooth:
            title, points = f"{title}, smoothed", smooth(points)
        if self.is_logarithmic:
            values = logarithms(points)
            title = f"{title}, log scale" if values else f"{title}, no positive values"
            points = values
        return plot(title, points, width, height, logarithmic=self.is_logarithmic, marks=self._marks)

    def render(self) -> Text:
        width, height = self.size
        if not self._curves:
            hint = (
                ": dtslurm reads $DTSLURM_METRICS and common log lines"
                if self.empty.startswith("no ")
                else ""
            )
            return Text(
                self.empty + hint, style=theme.style(self.app, "dim"), no_wrap=True, overflow="ellipsis"
            )
        shown = self._curves[: self.most]
        each = max(4, width // len(shown) - 1)
        blocks = [self._plot(curve, each, height) for curve in shown]
        text = Text(no_wrap=True)
        accent, dim = theme.style(self.app, "accent"), theme.style(self.app, "dim")
        for row in range(height):
            for number, block in enumerate(blocks):
                label, dots = block[row]
                text.append(" " if number else "")
                text.append(label, style="bold" if row == 0 else dim)
                text.append(dots, style=accent)
            text.append("\n" if row < height - 1 else "")
        return text


def plot(
    title: str,
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    *,
    logarithmic: bool = False,
    marks: Sequence[float] = (),
) -> list[tuple[str, str]]:
    """Return the lines of one plot as (label, dots): the title, then the curve beside its axis.

    Args:
        logarithmic: whether the points are `logarithms`; the axis shows the values themselves.
        marks: steps at which a vertical line is drawn behind the curve.
    """
    lines = [(clipped(title, width), "")]
    axis = _AXIS if width > 3 * _AXIS else 0
    below = 1 if axis and points and height >= _LEAST_HEIGHT else 0  # the line of the steps
    dots, low, high = scaled_curve(points, width - axis, max(0, height - 1 - below))
    marked = {at for mark in marks if (at := _column(mark, points, width - axis)) is not None}
    dots = [_with_marks(line, marked) for line in dots]
    for row, line in enumerate(dots):
        label = ""
        if axis and points and row in _ticks(len(dots)):
            value = high - (high - low) * row / max(1, len(dots) - 1)
            label = short(10**value if logarithmic else value)
        lines.append((f"{label:>{axis - 2}} {'┤' if label else '│'}" if axis else "", line))
    if below:
        lines.append(
            (_step_axis([step for step, _ in points], axis, width, RESTARTS if marked else "step"), "")
        )
    return lines[:height]


def _ticks(rows: int) -> set[int]:
    """Return the rows whose value is written beside the axis."""
    return {0, rows - 1} | ({(rows - 1) // 2} if rows >= _LEAST_HEIGHT else set())


def _column(step: float, points: Sequence[tuple[float, float]], width: int) -> int | None:
    """Return the column of a plot in which a step is, None where it is not within the plot."""
    first, last = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=0.0)
    if not first <= step <= last or first == last:
        return None
    return min(width - 1, int((step - first) / (last - first) * (2 * width - 1)) // 2)


def _with_marks(line: str, columns: set[int]) -> str:
    return "".join("┊" if at in columns and cell == " " else cell for at, cell in enumerate(line))


def _step_axis(steps: Sequence[float], axis: int, width: int, word: str) -> str:
    """Return the line below a plot: its first step, its last step, and a word between them."""
    first, last = short(min(steps)), short(max(steps))
    room = max(0, width - axis - len(first) - len(last))
    return " " * (axis - 1) + "└" + first + word.center(room)[:room] + last
