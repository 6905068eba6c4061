"""The widget that plots loss and throughput side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widget import Widget

from dtslurm.dashboard import theme
from dtslurm.dashboard.charts.plot import draw_scaled_curve, smooth, take_logarithms
from dtslurm.dashboard.rows import clip
from dtslurm.dashboard.words import format_short

Curve = tuple[str, list[tuple[float, float]]]
_AXIS_WIDTH = 8
_MIN_HEIGHT_WITH_STEPS = 6  # lines; lower plots have no line of steps
RESTARTS = "step, ┊ restarts"
_MIN_PLOT_WIDTH = 30  # columns


class Curves(Widget):
    """A widget with up to four plots that share its width."""

    DEFAULT_CSS = """
    Curves { height: 8; }
    Curves.-maximized { height: 1fr !important; max-height: 100% !important; }
    """
    ALLOW_MAXIMIZE = True

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._curves: Sequence[Curve] = ()
        self._restart_steps: Sequence[float] = ()
        self.empty = "loading …"
        self.is_smooth = False
        self.is_logarithmic = False

    @property
    def max_plots(self) -> int:
        """The number of plots that fit."""
        return max(1, min(4, self.size.width // _MIN_PLOT_WIDTH))

    def show(self, curves: Sequence[Curve], marks: Sequence[float] = ()) -> None:
        """Draw these curves, with a vertical line at each step in ``marks``, where an attempt began."""
        self._curves, self._restart_steps = curves, marks
        self.refresh()

    def _plot_curve(self, curve: Curve, width: int, height: int) -> list[tuple[str, str]]:
        """Return the lines of one plot, smoothed and on a logarithmic scale if the user selected that."""
        title, points = curve
        if self.is_smooth:
            title, points = f"{title}, smoothed", smooth(points)
        if self.is_logarithmic:
            values = take_logarithms(points)
            title = f"{title}, log scale" if values else f"{title}, no positive values"
            points = values
        return draw_plot(
            title, points, width, height, logarithmic=self.is_logarithmic, marks=self._restart_steps
        )

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
        visible_curves = self._curves[: self.max_plots]
        plot_width = max(4, width // len(visible_curves) - 1)
        blocks = [self._plot_curve(curve, plot_width, height) for curve in visible_curves]
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


def draw_plot(
    title: str,
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    *,
    logarithmic: bool = False,
    marks: Sequence[float] = (),
) -> list[tuple[str, str]]:
    """Return the lines of one plot as (label, dots): the title, then the axis labels and the curve.

    Args:
        logarithmic: whether the points are `logarithms`; the axis shows the original values.
        marks: steps at which a vertical line is drawn behind the curve.
    """
    lines = [(clip(title, width), "")]
    axis = _AXIS_WIDTH if width > 3 * _AXIS_WIDTH else 0
    step_lines = 1 if axis and points and height >= _MIN_HEIGHT_WITH_STEPS else 0  # the line with the steps
    dots, low, high = draw_scaled_curve(points, width - axis, max(0, height - 1 - step_lines))
    mark_columns = {
        column for mark in marks if (column := _find_column(mark, points, width - axis)) is not None
    }
    dots = [_draw_marks(line, mark_columns) for line in dots]
    for row, line in enumerate(dots):
        label = ""
        if axis and points and row in _choose_tick_rows(len(dots)):
            value = high - (high - low) * row / max(1, len(dots) - 1)
            label = format_short(10**value if logarithmic else value)
        lines.append((f"{label:>{axis - 2}} {'┤' if label else '│'}" if axis else "", line))
    if step_lines:
        lines.append(
            (
                _format_step_axis(
                    [step for step, _ in points], axis, width, RESTARTS if mark_columns else "step"
                ),
                "",
            )
        )
    return lines[:height]


def _choose_tick_rows(rows: int) -> set[int]:
    """Return the rows with a value label at the axis."""
    return {0, rows - 1} | ({(rows - 1) // 2} if rows >= _MIN_HEIGHT_WITH_STEPS else set())


def _find_column(step: float, points: Sequence[tuple[float, float]], width: int) -> int | None:
    """Return the column of a step in a plot; None if the step is outside the plot."""
    first, last = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=0.0)
    if not first <= step <= last or first == last:
        return None
    return min(width - 1, int((step - first) / (last - first) * (2 * width - 1)) // 2)


def _draw_marks(line: str, columns: set[int]) -> str:
    return "".join("┊" if index in columns and cell == " " else cell for index, cell in enumerate(line))


def _format_step_axis(steps: Sequence[float], axis: int, width: int, label: str) -> str:
    """Return the line below a plot: its first step, a word in the middle, and its last step."""
    first, last = format_short(min(steps)), format_short(max(steps))
    label_width = max(0, width - axis - len(first) - len(last))
    return " " * (axis - 1) + "└" + first + label.center(label_width)[:label_width] + last
