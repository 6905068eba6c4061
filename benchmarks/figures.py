"""Numbers with their spread, and how a benchmark hands them to the page, beside what it prints."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HANDED = "DTSLURM_BENCHMARK_CHARTS"  # names the file that `python -m benchmarks` reads


@dataclass(frozen=True)
class Bar:
    """One measured thing: its middle value, the middle half of its rounds, and the ratio to another thing.

    A thing that failed has no value, and says why.
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
    """Things that were measured in turns; ratios are to the one named in `beside`."""

    title: str
    unit: str
    beside: str
    bars: tuple[Bar, ...]


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return mid, low, high


def chart(
    title: str, unit: str, beside: str, rounds: dict[str, list[float]], failed: dict[str, str] | None = None
) -> Chart:
    """Return a chart of things measured in the same rounds: ratios are taken round by round."""
    bars = []
    for name, values in rounds.items():
        if not values:
            bars.append(Bar(name, None, note=(failed or {}).get(name, "failed")))
            continue
        ratios = [one / other for one, other in zip(values, rounds[beside], strict=False) if other]
        bars.append(Bar(name, *middle(values), *(middle(ratios) if ratios else ())))
    return Chart(title, unit, beside, tuple(bars))


def show(charts: Sequence[Chart]) -> None:
    """Print charts as tables, and hand them to `python -m benchmarks` if that is running this."""
    for one in charts:
        width = max(len(bar.name) for bar in one.bars) + 2
        print(f"{one.title}, {one.unit}" + (f"; ratios to {one.beside}" if one.beside else ""))
        for bar in one.bars:
            if bar.value is None:
                print(f"  {bar.name:<{width}}FAILED: {bar.note}")
                continue
            spread = f" ({number(bar.low)} - {number(bar.high)})" if bar.low != bar.high else ""
            print(f"  {bar.name:<{width}}{number(bar.value):>9}{spread:<20}", end="")
            if bar.ratio is not None:
                spread = f" ({number(bar.ratio_low)} - {number(bar.ratio_high)})"
                print(f"{number(bar.ratio):>8} x{spread if bar.ratio_low != bar.ratio_high else ''}", end="")
            print(f"  {bar.note}".rstrip())
        print()
    if handed := os.environ.get(HANDED):
        Path(handed).write_text(json.dumps([asdict(one) for one in charts]))


def number(value: float | None) -> str:
    """Return a number with three digits that count."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:,.{digits}f}"
