"""Charts of measured values with their spread, as a benchmark prints them and passes them to the page."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHARTS_FILE = "DTSLURM_BENCHMARK_CHARTS"  # the variable with the path of the file that ``__main__`` reads


@dataclass(frozen=True)
class Bar:
    """One measured command or method: median, quartiles, and the ratio to the reference of its chart.

    The value is None if the measurement failed; ``note`` then has the error message.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Bars that were measured alternately. ``beside`` names the bar that ratios refer to, if there is one."""

    title: str
    unit: str
    beside: str
    bars: tuple[Bar, ...]


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the first quartile and the third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def compare_rounds(
    title: str, unit: str, beside: str, rounds: dict[str, list[float]], failed: dict[str, str] | None = None
) -> Chart:
    """Return a chart of values from the same rounds; each ratio is computed within its round."""
    bars = []
    for name, values in rounds.items():
        if not values:
            bars.append(Bar(name, None, note=(failed or {}).get(name, "failed")))
            continue
        pairs = zip(values, rounds[beside], strict=False)
        ratios = [value / reference for value, reference in pairs if reference]
        quartiles = median_and_quartiles(ratios) if ratios else ()
        bars.append(Bar(name, *median_and_quartiles(values), *quartiles))
    return Chart(title, unit, beside, tuple(bars))


def format_charts(charts: Sequence[Chart]) -> str:
    """Return charts as text tables."""
    lines = []
    for chart in charts:
        width = max(len(bar.name) for bar in chart.bars) + 2
        lines.append(
            f"{chart.title} ({chart.unit})" + (f"; ratios to {chart.beside}" if chart.beside else "")
        )
        for bar in chart.bars:
            if bar.value is None:
                lines.append(f"  {bar.name:<{width}}FAILED: {bar.note}")
                continue
            spread = f" ({format_number(bar.low)} - {format_number(bar.high)})" if bar.low != bar.high else ""
            line = f"  {bar.name:<{width}}{format_number(bar.value):>9}{spread:<20}"
            if bar.ratio is not None:
                spread = f" ({format_number(bar.ratio_low)} - {format_number(bar.ratio_high)})"
                line += f"{format_number(bar.ratio):>8} x{spread if bar.ratio_low != bar.ratio_high else ''}"
            lines.append(f"{line}  {bar.note}".rstrip())
        lines.append("")
    return "\n".join(lines)


def print_charts(charts: Sequence[Chart]) -> None:
    """Print charts as tables, and write them to the file that `python -m benchmarks` reads, if it is set."""
    print(format_charts(charts))
    if path := os.environ.get(CHARTS_FILE):
        Path(path).write_text(json.dumps([asdict(chart) for chart in charts]))


def format_number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:,.{digits}f}"
