"""Strips over time: a line of cells for each rank, GPU or node, outliers first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dtslurm.dashboard.words import StyledText, format_moment
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.services.observe.utilization_history import Percentages, UtilizationHistory
from dtslurm.views.run_page import drawable, finite

MOST_STRIPS = 512  # the maximum number of strips shown; outliers come first
LEVELS = "▁▂▃▄▅▆▇█"
SLOW, VERY_SLOW = 1.1, 1.5  # multiples of the median step time
LOW, VERY_LOW = 25.0, 50.0  # percentage points below the median
_MAX_GAP_FACTOR = 3.0  # multiple of the usual time between two records; a longer time is a gap


@dataclass(frozen=True)
class Strip:
    """One rank, GPU or node: its label, a cell for each time interval, and whether it is an outlier."""

    label: str
    cells: tuple[StyledText, ...]
    stands_out: bool = False


@dataclass(frozen=True)
class Strips:
    """The strips of the time from ``begin`` to ``end``, and the legend of their cells."""

    legend: str = ""
    begin: float = 0.0
    end: float = 0.0
    rows: tuple[Strip, ...] = ()
    left_out: int = 0


class _StepTime(NamedTuple):
    """A step time of a rank in the interval between two of its metric records."""

    begin: float
    end: float
    seconds: float


def average_gpus(history: UtilizationHistory, width: int) -> Percentages:
    """Return the mean utilization of all GPUs in ``width`` time intervals; empty without GPU samples."""
    if not history.gpus:
        return ()
    columns = zip(*(rebin(row.values, width) for row in history.gpus), strict=False)
    return tuple(statistics.fmean(samples) if (samples := finite(column)) else None for column in columns)


def rebin(values: Percentages, width: int) -> Percentages:
    """Average neighboring values, so that at most ``width`` values remain."""
    if len(values) <= width:
        return values
    bounds = [len(values) * number // width for number in range(width + 1)]
    return tuple(
        statistics.fmean(samples) if (samples := finite(values[begin:end])) else None
        for begin, end in pairwise(bounds)
    )


def draw_spark_line(values: Percentages) -> str:
    """Return percentages as a line of block characters, with a space for each unknown value."""
    return "".join(" " if value is None else choose_block(value / 100) for value in values)


def choose_block(share: float) -> str:
    """Return the block character whose height matches a share between 0 and 1."""
    return LEVELS[max(0, min(len(LEVELS) - 1, int(share * len(LEVELS))))]


def step_strips(points: Sequence[TrainPoint], width: int) -> Strips | None:
    """Return a strip of step times for each rank; None if fewer than two ranks report step times."""
    times_by_rank = {
        rank: step_times for rank, step_times in _collect_step_times(points).items() if step_times
    }
    if len(times_by_rank) < 2:
        return None
    moments = [step_time.end for step_times in times_by_rank.values() for step_time in step_times]
    begin, end = min(moments), max(moments)
    width = max(1, min(width, max(map(len, times_by_rank.values()))))
    binned_times = {
        rank: _average_into_bins(step_times, begin, end, width) for rank, step_times in times_by_rank.items()
    }
    medians = _column_medians(list(binned_times.values()))
    rows = []
    for rank, values in sorted(binned_times.items()):
        ratios = [
            None if value is None or not median else value / median
            for value, median in zip(values, medians, strict=True)
        ]
        known_ratios = finite(ratios)
        is_outlier = bool(known_ratios) and statistics.fmean(known_ratios) >= SLOW
        rows.append(Strip(f"rank {rank}", tuple(map(_step_cell, ratios)), is_outlier))
    legend = f"step time / median of all ranks: ▂ below {SLOW:g}, ▅ from {SLOW:g}, █ from {VERY_SLOW:g}"
    return _limit_strips(legend, begin, end, rows)


def utilization_strips(history: UtilizationHistory, width: int) -> Strips:
    """Return a utilization strip for each GPU; for each node's CPUs if no GPU was sampled."""
    main_rows = history.main_rows
    binned_rows = [rebin(row.values, width) for row in main_rows]
    medians = _column_medians(binned_rows)
    rows = []
    for row, values in zip(main_rows, binned_rows, strict=True):
        deficits = [
            median - value
            for value, median in zip(values, medians, strict=False)
            if value is not None and median is not None
        ]
        cells = tuple(
            _utilization_cell(value, median) for value, median in zip(values, medians, strict=False)
        )
        rows.append(Strip(row.label, cells, bool(deficits) and statistics.fmean(deficits) >= LOW))
    colours = f"yellow {LOW:.0f}, red {VERY_LOW:.0f} points below the median"
    legend = f"{history.unit} use, 0 to 100 % by height; {colours}"
    return _limit_strips(legend, history.begin, history.end, rows)


def describe_strips(strips: Strips, now: float) -> list[StyledText]:
    """Return the two lines below the strips: their time span with the number of outliers, and the legend."""
    if not strips.rows:
        return []
    begin, end = (time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (strips.begin, strips.end))
    day = "" if abs(now - strips.begin) < 86400 else f" (began {format_moment(strips.begin, now)})"
    outliers = sum(strip.stands_out for strip in strips.rows)
    summary = f"▲ {pluralize(outliers, 'outlier')}" if outliers else "no outliers"
    suffix = f" · {strips.left_out:,} more rows are not shown" if strips.left_out else ""
    return [
        (f"{begin} to {end}{day} · {summary}{suffix}", "bad" if outliers else "dim"),
        (strips.legend, "dim"),
    ]


def _limit_strips(legend: str, begin: float, end: float, rows: list[Strip]) -> Strips:
    outliers_first = sorted(rows, key=lambda strip: not strip.stands_out)
    return Strips(
        legend, begin, end, tuple(outliers_first[:MOST_STRIPS]), max(0, len(outliers_first) - MOST_STRIPS)
    )


def _collect_step_times(points: Sequence[TrainPoint]) -> dict[int, list[_StepTime]]:
    """Return the step times of each rank: as reported, or from the time between two of its steps."""
    times_by_rank: dict[int, list[_StepTime]] = {}
    last_by_rank: dict[int, tuple[float, int | None]] = {}
    for point in points:
        if point.rank is None or point.time is None or not drawable(point.time):
            continue
        previous_time, previous_step = last_by_rank.get(point.rank, (point.time, None))
        seconds = point.step_time_s
        if (
            not drawable(seconds)
            and point.step is not None
            and previous_step is not None
            and point.step > previous_step
        ):
            seconds = (point.time - previous_time) / (point.step - previous_step)
        rank_times = times_by_rank.setdefault(point.rank, [])
        if seconds is not None and drawable(seconds) and seconds > 0:
            rank_times.append(_StepTime(min(previous_time, point.time), point.time, seconds))
        last_by_rank[point.rank] = point.time, point.step
    return times_by_rank


def _average_into_bins(times: Sequence[_StepTime], begin: float, end: float, width: int) -> Percentages:
    """Return the mean step time in each of ``width`` time intervals.

    A step time also applies to the time since the previous record, except after a gap that is far longer than
    usual: the step times during such a gap are unknown.
    """
    usual_length = statistics.median(step_time.end - step_time.begin for step_time in times)
    columns_per_second = width / (end - begin) if end > begin else 0.0
    seconds_by_column: list[list[float]] = [[] for _ in range(width)]
    for step_time in times:
        start = (
            step_time.begin
            if step_time.end - step_time.begin <= _MAX_GAP_FACTOR * usual_length
            else step_time.end
        )
        last = min(width - 1, int((step_time.end - begin) * columns_per_second))
        first = min(last, int((start - begin) * columns_per_second) + 1)
        for column in range(max(0, first), last + 1):
            seconds_by_column[column].append(step_time.seconds)
    return tuple(
        statistics.fmean(column_seconds) if column_seconds else None for column_seconds in seconds_by_column
    )


def _column_medians(rows: Sequence[Percentages]) -> Percentages:
    width = max(map(len, rows), default=0)
    columns = ([row[number] for row in rows if number < len(row)] for number in range(width))
    return tuple(statistics.median(samples) if (samples := finite(column)) else None for column in columns)


def _step_cell(ratio: float | None) -> StyledText:
    if ratio is None:
        return " ", ""
    if ratio >= VERY_SLOW:
        return "█", "bad"
    return ("▅", "warn") if ratio >= SLOW else ("▂", "good")


def _utilization_cell(value: float | None, median: float | None) -> StyledText:
    if value is None:
        return " ", ""
    deficit = 0.0 if median is None else median - value
    return choose_block(value / 100), "bad" if deficit >= VERY_LOW else "warn" if deficit >= LOW else "good"
