"""Strips over time: a line of cells for each rank, GPU or node, those that stand out first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dtslurm.dashboard.words import Piece, at
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.model.units import pluralize
from dtslurm.model.values import dataclass
from dtslurm.services.observe.utilization_history import Percentages, UtilizationHistory
from dtslurm.views.run_page import drawable, finite

MOST_STRIPS = 512  # that are kept of many; those that stand out come first
LEVELS = "▁▂▃▄▅▆▇█"
SLOW, VERY_SLOW = 1.1, 1.5  # times the median
LOW, VERY_LOW = 25.0, 50.0  # percentage points below the median
_USUAL_TIMES = 3.0


@dataclass(frozen=True)
class Strip:
    """One rank, GPU or node: its label, a cell for each span of time, and whether it stands out."""

    label: str
    cells: tuple[Piece, ...]
    stands_out: bool = False


@dataclass(frozen=True)
class Strips:
    """What is drawn: strips from ``begin`` to ``end``, and what their cells mean."""

    legend: str = ""
    begin: float = 0.0
    end: float = 0.0
    rows: tuple[Strip, ...] = ()
    left_out: int = 0


class _StepTime(NamedTuple):
    """A step time that a rank had between two moments."""

    begin: float
    end: float
    seconds: float


def average_gpus(history: UtilizationHistory, width: int) -> Percentages:
    """Return the mean use of all GPUs in so many spans of time; empty where no GPU was sampled."""
    if not history.gpus:
        return ()
    columns = zip(*(rebin(row.values, width) for row in history.gpus), strict=False)
    return tuple(statistics.fmean(known) if (known := finite(column)) else None for column in columns)


def rebin(values: Percentages, width: int) -> Percentages:
    """Return the means of neighbours, so that there are at most so many values."""
    if len(values) <= width:
        return values
    bounds = [len(values) * number // width for number in range(width + 1)]
    return tuple(
        statistics.fmean(known) if (known := finite(values[begin:end])) else None
        for begin, end in pairwise(bounds)
    )


def draw_spark_line(values: Percentages) -> str:
    """Return percentages as a line of blocks, with a space where nothing is known."""
    return "".join(" " if value is None else choose_block(value / 100) for value in values)


def choose_block(share: float) -> str:
    """Return the block that is as high as a share, 0 to 1."""
    return LEVELS[max(0, min(len(LEVELS) - 1, int(share * len(LEVELS))))]


def step_strips(points: Sequence[TrainPoint], width: int) -> Strips | None:
    """Return a strip of step times for each rank, None where fewer than two ranks told any."""
    times = {rank: of_rank for rank, of_rank in _step_times(points).items() if of_rank}
    if len(times) < 2:
        return None
    moments = [one.end for of_rank in times.values() for one in of_rank]
    begin, end = min(moments), max(moments)
    width = max(1, min(width, max(map(len, times.values()))))
    binned = {rank: _binned(of_rank, begin, end, width) for rank, of_rank in times.items()}
    middles = _medians(list(binned.values()))
    rows = []
    for rank, values in sorted(binned.items()):
        ratios = [
            None if value is None or not middle else value / middle
            for value, middle in zip(values, middles, strict=True)
        ]
        known = finite(ratios)
        out = bool(known) and statistics.fmean(known) >= SLOW
        rows.append(Strip(f"rank {rank}", tuple(map(_step_cell, ratios)), out))
    legend = f"step time / median of all ranks: ▂ below {SLOW:g}, ▅ from {SLOW:g}, █ from {VERY_SLOW:g}"
    return _limit_strips(legend, begin, end, rows)


def utilization_strips(history: UtilizationHistory, width: int) -> Strips:
    """Return a strip of use for each GPU, or for each node's CPUs where no GPU was sampled."""
    chosen = history.main_rows
    binned = [rebin(row.values, width) for row in chosen]
    middles = _medians(binned)
    rows = []
    for row, values in zip(chosen, binned, strict=True):
        below = [
            middle - value
            for value, middle in zip(values, middles, strict=False)
            if value is not None and middle is not None
        ]
        cells = tuple(_use_cell(value, middle) for value, middle in zip(values, middles, strict=False))
        rows.append(Strip(row.label, cells, bool(below) and statistics.fmean(below) >= LOW))
    scale = f"yellow {LOW:.0f}, red {VERY_LOW:.0f} points below the median"
    legend = f"{history.unit} use, 0 to 100 % by height; {scale}"
    return _limit_strips(legend, history.begin, history.end, rows)


def describe_strips(strips: Strips, now: float) -> list[Piece]:
    """Return the two lines below the strips: the time that they span, and what their cells mean."""
    if not strips.rows:
        return []
    begin, end = (time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (strips.begin, strips.end))
    day = "" if abs(now - strips.begin) < 86400 else f" (began {at(strips.begin, now)})"
    odd = sum(strip.stands_out for strip in strips.rows)
    told = (
        f"▲ {pluralize(odd, 'row')} {'stands' if odd == 1 else 'stand'} out" if odd else "no row stands out"
    )
    more = f" · {strips.left_out:,} more rows are not shown" if strips.left_out else ""
    return [(f"{begin} to {end}{day} · {told}{more}", "bad" if odd else "dim"), (strips.legend, "dim")]


def _limit_strips(legend: str, begin: float, end: float, rows: list[Strip]) -> Strips:
    ordered = sorted(rows, key=lambda strip: not strip.stands_out)
    return Strips(legend, begin, end, tuple(ordered[:MOST_STRIPS]), max(0, len(ordered) - MOST_STRIPS))


def _step_times(points: Sequence[TrainPoint]) -> dict[int, list[_StepTime]]:
    """Return the step times of each rank: as it said, or by the time between two of its steps."""
    found: dict[int, list[_StepTime]] = {}
    last: dict[int, tuple[float, int | None]] = {}
    for point in points:
        if point.rank is None or point.time is None or not drawable(point.time):
            continue
        before, step = last.get(point.rank, (point.time, None))
        seconds = point.step_time_s
        if not drawable(seconds) and point.step is not None and step is not None and point.step > step:
            seconds = (point.time - before) / (point.step - step)
        times = found.setdefault(point.rank, [])
        if seconds is not None and drawable(seconds) and seconds > 0:
            times.append(_StepTime(min(before, point.time), point.time, seconds))
        last[point.rank] = point.time, point.step
    return found


def _binned(times: Sequence[_StepTime], begin: float, end: float, width: int) -> Percentages:
    """Return the mean step time in each span of time.

    A value holds back to the point before, but not over a gap that is far longer than usual: nothing is known
    of that.
    """
    usual = statistics.median(one.end - one.begin for one in times)
    scale = width / (end - begin) if end > begin else 0.0
    sums: list[list[float]] = [[] for _ in range(width)]
    for one in times:
        since = one.begin if one.end - one.begin <= _USUAL_TIMES * usual else one.end
        last = min(width - 1, int((one.end - begin) * scale))
        first = min(last, int((since - begin) * scale) + 1)
        for place in range(max(0, first), last + 1):
            sums[place].append(one.seconds)
    return tuple(statistics.fmean(values) if values else None for values in sums)


def _medians(rows: Sequence[Percentages]) -> Percentages:
    width = max(map(len, rows), default=0)
    columns = ([row[number] for row in rows if number < len(row)] for number in range(width))
    return tuple(statistics.median(known) if (known := finite(column)) else None for column in columns)


def _step_cell(ratio: float | None) -> Piece:
    if ratio is None:
        return " ", ""
    if ratio >= VERY_SLOW:
        return "█", "bad"
    return ("▅", "warn") if ratio >= SLOW else ("▂", "good")


def _use_cell(value: float | None, middle: float | None) -> Piece:
    if value is None:
        return " ", ""
    below = 0.0 if middle is None else middle - value
    return choose_block(value / 100), "bad" if below >= VERY_LOW else "warn" if below >= LOW else "good"
