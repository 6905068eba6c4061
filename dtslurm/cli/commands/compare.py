"""``dtslurm compare``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import click

from dtslurm.cli.completers import complete_jobs
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.errors import StoreError
from dtslurm.logs.clean import safe
from dtslurm.model.paths import expand_home
from dtslurm.presentation.quantities import METRIC_LABELS, duration, format_short_number
from dtslurm.services.observe.compare import METRICS, MOST_RUNS, ComparedRun, Comparison
from dtslurm.services.observe.compare import compare as compare_runs
from dtslurm.services.observe.curves import Curve
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context

_MARKS = "ox+*#%@&"
_HEIGHT, _MARGIN = 12, 11


@click.command()
@click.option("-o", "--output", "target", metavar="FILE", help="Write one HTML page with all curves instead.")
@cluster_option
@json_option
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)
def compare(target: str | None, cluster: str | None, as_json: bool, jobs: tuple[str, ...]) -> None:
    """Compare runs: results, speed, cost, curves, and differences in their requests.

    Configuration, layout, environment and code are shown where they differ. Curves join a run's attempts.
    """
    if not 2 <= len(jobs) <= MOST_RUNS:
        raise click.UsageError(f"two to {MOST_RUNS} runs can be compared; {len(jobs)} are given")
    context = Context()
    comparison = compare_runs(context, [find(context, job, cluster) for job in jobs])
    if as_json:
        output.document(runs=comparison.runs, differences=comparison.differences)
    elif target is not None:
        path = context.cwd / expand_home(target)
        if path.is_dir():
            raise StoreError(f"cannot write {path}: it is a folder")
        context.transport.put(
            _render_page(comparison, context.clock()).encode("utf-8", "surrogateescape"), str(path)
        )
        output.say(str(path))
    else:
        _show(comparison)


def _show(comparison: Comparison) -> None:
    for number, table in enumerate(_make_tables(comparison)):
        if number:
            output.say()
        output.table(table[0], table[1:])
    for line in _plot_losses(comparison, (output.width() or 80) - 1):
        output.say(line)
    for line in _list_unreadable_metrics(comparison):
        output.note(line)


def format_comparison(comparison: Comparison, width: int) -> list[str]:
    """Return the command's output as lines of text; the plot of losses is ``width`` columns wide."""
    tables = [["", *_format_table(table)] for table in _make_tables(comparison)]
    text_lines = [line for table in tables for line in table][1:]
    return [*text_lines, *_plot_losses(comparison, width - 1), *_list_unreadable_metrics(comparison)]


def _make_tables(comparison: Comparison) -> Iterator[list[tuple[str, ...]]]:
    """Yield the table of the results, then one for each section of differences; titles come first."""
    names = [_run_label(run) for run in comparison.runs]
    yield [("", *names), *summarize_runs(comparison.runs)]
    for section in dict.fromkeys(difference.section for difference in comparison.differences):
        rows = [item for item in comparison.differences if item.section == section]
        yield [(section.upper(), *names), *((item.name, *item.values) for item in rows)]


def _plot_losses(comparison: Comparison, width: int) -> list[str]:
    text_lines = [] if comparison.differences else ["", "the requests are identical"]
    curves = [run.curves.get("loss", ()) for run in comparison.runs]
    if any(curves):
        text_lines += ["", *draw_curves(curves, width)]
        legend = [f"{_MARKS[number]} {_run_label(run)}" for number, run in enumerate(comparison.runs)]
        text_lines.append("  ".join(legend))
    return text_lines


def _list_unreadable_metrics(comparison: Comparison) -> list[str]:
    return [
        f"note: the metrics of {_run_label(run)} could not be read: {run.problem}"
        for run in comparison.runs
        if run.problem
    ]


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    clean = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*clean, strict=True)]
    return [
        "  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in clean
    ]


def _run_label(run: ComparedRun) -> str:
    return f"{run.record.job_id or 'no job'} {run.record.name}"


def summarize_runs(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """Return (label, value of each run) rows of results, speed and cost, without rows that have no values."""
    rows = {
        "state": [run.state for run in runs],
        "cluster": [run.record.cluster for run in runs],
        "nodes": [str(run.nodes or "") for run in runs],
        "ranks": [str(run.ranks or "") for run in runs],
        "GPUs": [str(run.gpus or "") for run in runs],
        "ran for": ["" if run.took_s is None else duration(run.took_s) for run in runs],
        "attempts": [str(run.attempts or "") for run in runs],
        "last step": ["" if run.last_step is None else str(run.last_step) for run in runs],
        "last loss": [_format_optional_number(run.last_loss) for run in runs],
        "best loss": [_format_optional_number(run.best_loss) for run in runs],
        "tokens/s": [_format_optional_number(run.tokens_per_s) for run in runs],
        "step time, s": [_format_optional_number(run.step_time_s) for run in runs],
        "GPU hours": [_format_optional_number(run.gpu_hours) for run in runs],
        "price": [f"{_format_optional_number(run.cost)} {run.currency}".strip() for run in runs],
    }
    return [(name, *(value or "-" for value in values)) for name, values in rows.items() if any(values)]


def _format_optional_number(value: float | None) -> str:
    return "" if value is None else format_short_number(value)


def draw_curves(curves: Sequence[Curve], width: int) -> list[str]:
    """Return a plot of curves as lines of text; where marks coincide, the later run's is shown."""
    points = [(step, value) for curve in curves for step, value in curve]
    steps, values = [step for step, _ in points], [value for _, value in points]
    first_step, last_step, low, high = min(steps), max(steps), min(values), max(values)
    columns = max(20, width - _MARGIN)
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for mark, curve in zip(_MARKS, curves, strict=False):
        for step, value in curve:
            column = round((step - first_step) / max(1, last_step - first_step) * (columns - 1))
            height = (value - low) / (high - low) if high > low else 0.0
            grid[_HEIGHT - 1 - math.floor(height * (_HEIGHT - 1) + 0.5)][column] = mark
    ticks = {0: _format_optional_number(high), _HEIGHT - 1: _format_optional_number(low)}
    lines = [
        f"{ticks.get(row, ''):>{_MARGIN - 2}} ┤{''.join(cells).rstrip()}" for row, cells in enumerate(grid)
    ]
    axis = f"{first_step}{str(last_step).rjust(columns - len(str(first_step)))}"
    return ["loss by step", *lines, " " * (_MARGIN - 1) + "└" + "─" * (columns - 1), " " * _MARGIN + axis]


def _render_page(comparison: Comparison, now: float) -> str:
    from dtslurm.presentation.quantities import format_utc
    from dtslurm.render.page import page

    names = [_run_label(run) for run in comparison.runs]
    charts = []
    for metric in METRICS:
        curves = [dict(run.curves.get(metric, ())) for run in comparison.runs]
        steps = sorted({step for curve in curves for step in curve})
        if len(steps) > 1:
            lines = [
                {"label": name, "values": [curve.get(step) for step in steps]}
                for name, curve in zip(names, curves, strict=True)
            ]
            charts.append({"label": METRIC_LABELS[metric], "steps": steps, "lines": lines})
    return page(
        "compare.html.j2",
        {
            "names": names,
            "summary": summarize_runs(comparison.runs),
            "differences": comparison.differences,
            "curves": charts,
            "curves_note": "",
            "made_at": format_utc(now),
        },
    )
