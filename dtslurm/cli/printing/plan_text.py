"""A plan as text with bars, and as JSON."""

from __future__ import annotations

import math
import re
from typing import Any

from dtslurm.cli.printing import output
from dtslurm.cli.printing.styles import FAILED, MAIN, SECONDARY
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.explain import term_words
from dtslurm.planner.intervals import Interval
from dtslurm.presentation.quantities import duration
from dtslurm.services.planning.plan import Plan

# Both bars share one legend: memory terms have capital letters, time terms small letters.
_MEMORY_MARKS = {
    "weights": "W",
    "gradients": "G",
    "master_weights": "M",
    "optimizer": "O",
    "gathered_weights": "S",
    "activations": "A",
    "logits": "L",
    "buffers": "B",
    "fragmentation": "F",
    "context": "C",
}
_TIME_MARKS = {
    "matmul": "m",
    "experts": "x",
    "attention": "a",
    "elementwise": "n",
    "head": "h",
    "recompute": "r",
    "launch": "l",
    "tp_comm": "t",
    "cp_comm": "c",
    "ep_comm": "e",
    "fsdp_comm": "f",
    "pp_comm": "p",
    "bubble": ".",
    "dp_comm": "g",
    "optimizer": "o",
    "jitter": "j",
    "overhead": "s",
}
_BEST = "bold green"
_WIDTH, _STEP_WIDTH = 40, 72
_OTHER_COLUMNS = 58  # width of the other columns of the layout table, with padding
_MEASURED_COLUMN = 10
_LAYOUT = (
    "tp",
    "pp",
    "cp",
    "ep",
    "dp",
    "vp",
    "mbs",
    "gbs",
    "zero",
    "recompute",
    "sp",
    "schedule",
    "offload",
)


def show(plan: Plan) -> None:
    """Print a plan: model and machine, the layouts, the reasons, the warnings."""
    task = plan.task
    model, machine = task.model, task.machine
    size = f"{model.params / 1e9:.3g} B parameters"
    if model.is_moe:
        size += f", {model.active_params / 1e9:.3g} B active"
    _print_folded(
        f"{model.name}: {size}; {machine.nodes} x {machine.gpus_per_node} {machine.gpu.name}; "
        f"sequences of {task.seq_len}, {task.gbs} a step; {task.framework}, {task.precision}",
        style=MAIN,
    )
    for line in plan.notes:
        for wrapped_line in output.fold(f"assumed: {line}", len("assumed: ")).split("\n"):
            output.note(wrapped_line)
    if plan.chosen:
        output.say()
        output.table(
            ("", "LAYOUT", *_step_columns(plan), "TOKENS/S/GPU", "TFLOP/S", "MFU", "GIB"),
            [_make_layout_row(plan, index, output.width()) for index in range(1, len(plan.chosen) + 1)],
            row_styles={0: _BEST},
            lines=True,
        )
        _show_bars(plan)
    if plan.chosen:
        _print_section("", plan.unfit, SECONDARY)
    else:
        _print_section("", ("no layout fits", *plan.unfit), FAILED)
    _print_section("why", plan.why)
    _print_section("otherwise", plan.others, SECONDARY)
    _print_section("mind", plan.warnings, MAIN)
    _print_totals(plan)
    if plan.curve:
        _print_curve(plan)


def _show_bars(plan: Plan) -> None:
    """Print the memory bar of each layout and the time bar of the best one, with scales and one legend."""
    gpu_memory = plan.task.machine.gpu.memory_gib
    best = plan.chosen[0]
    widest = max(gpu_memory, *(item.memory.total for item in plan.chosen))
    output.say()
    output.say("memory of a GPU:")
    for index, item in enumerate(plan.chosen, 1):
        output.say(f"{index} {draw_memory_bar(item, gpu_memory, widest)}")
    _print_styled(f"   {draw_scale(widest, 'GiB', _WIDTH)}", SECONDARY)
    output.say()
    output.say("time of one step of 1:")
    output.say(f"  [{draw_time_bar(best)}]")
    _print_styled(f"   {draw_scale(best.time.total, 's', _STEP_WIDTH)}", SECONDARY)
    output.say()
    used_marks = "".join(draw_memory_bar(item, gpu_memory, widest).partition("]")[0] for item in plan.chosen)
    legend = [
        *(f"{mark} {name.replace('_', ' ')}" for name, mark in _MEMORY_MARKS.items() if mark in used_marks),
        *(f"{mark} {term_words(name)}" for name, mark in _TIME_MARKS.items() if mark in draw_time_bar(best)),
    ]
    for line in _fold_legend(legend):
        _print_styled(f"  {line}", SECONDARY)


def draw_scale(maximum: float, unit: str, width: int) -> str:
    """Return the labels under a bar of ``width`` characters: 0, the half, and the end with its unit."""
    half_label, end_label = f"{maximum / 2:.3g}", f"{maximum:.3g} {unit}"
    line = f"{'0':<{width // 2}}{half_label}"
    return f"{line:<{max(width - len(end_label) + 2, len(line) + 1)}}{end_label}"


def _fold_legend(entries: list[str]) -> list[str]:
    """Wrap the legend to the terminal's width, without breaking entries."""
    width = output.width()
    lines = [""]
    for entry in entries:
        longer_line = f"{lines[-1]}, {entry}" if lines[-1] else entry
        if width is not None and len(longer_line) + 3 > width and lines[-1]:
            lines[-1] += ","
            lines.append(entry)
        else:
            lines[-1] = longer_line
    return lines


def _print_styled(text: str, style: str) -> None:
    output.say(output.styled((text, style)))


def _print_folded(text: str, indent: int = 0, style: str = "") -> None:
    """Print a text wrapped to the terminal; its first ``indent`` columns are a label."""
    for number, line in enumerate(output.fold(text, indent).split("\n")):
        start = indent if number == 0 else 0
        output.say(output.styled((line[:start], SECONDARY), (line[start:], style)))


def format_time_with_interval(seconds: float, interval: Interval) -> str:
    """Return a time with its 80 % interval: ``5.8 s (5.1-6.9)``."""
    low, high = interval.bounds(seconds)
    return f"{seconds:.3g} s ({_format_two_digits(low)}-{_format_two_digits(high)})"


def _format_two_digits(value: float) -> str:
    """Return a number with two significant digits, and never with an exponent."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"


def _step_columns(plan: Plan) -> tuple[str, ...]:
    measured = any(item.predicted_s is not None for item in plan.chosen)
    return ("MEASURED", "PREDICTED") if measured else ("STEP",)


def _make_layout_row(plan: Plan, index: int, width: int | None) -> list[str]:
    estimate = plan.chosen[index - 1]
    layout = str(estimate.layout)
    columns = _step_columns(plan)
    other_columns_width = _OTHER_COLUMNS + _MEASURED_COLUMN * (len(columns) - 1)
    if width is not None:  # wrap after a comma, never within a number
        layout = "\n".join(_fold_layout(layout, max(20, width - other_columns_width)))
    measured = "-" if estimate.predicted_s is None else f"{estimate.time.total:.3g} s"
    predicted_s = estimate.time.total if estimate.predicted_s is None else estimate.predicted_s
    return [
        str(index),
        layout,
        *([measured] if len(columns) > 1 else []),
        format_time_with_interval(predicted_s, plan.interval),
        f"{estimate.tokens_per_s_per_gpu:,.0f}",
        f"{estimate.tflops_per_gpu:.0f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.memory.total:.1f}",
    ]


def _fold_layout(layout: str, width: int) -> list[str]:
    lines = [""]
    for setting in re.split(r"(?<=,)", layout):
        if len(lines[-1]) + len(setting) > width and lines[-1]:
            lines.append("")
        lines[-1] += setting
    return lines


def _print_section(title: str, lines: tuple[str, ...], style: str = "") -> None:
    if not lines or lines == ("no layout fits",):
        return
    output.say()
    for index, line in enumerate(lines):
        label = f"{title + ':' if index == 0 else '':<11}" if title else ""
        _print_folded(label + line, len(label), style)


def draw_memory_bar(estimate: Estimate, capacity_gib: float, full_width_gib: float) -> str:
    """Return a bar of the memory terms; its full width corresponds to ``full_width_gib``."""
    scale = _WIDTH / full_width_gib
    bar = ""
    filled = 0.0
    for name, mark in _MEMORY_MARKS.items():
        filled += estimate.memory.terms[name] * scale
        bar += mark * (round(filled) - len(bar))
    return f"[{bar:<{_WIDTH}}] {estimate.memory.total:.1f} of {capacity_gib:.0f} GiB"


def draw_time_bar(estimate: Estimate) -> str:
    """Return a bar of one step's time terms, to scale: the micro-batches first, then the rest of the step."""
    bar = ""
    filled = 0.0
    for name, mark in _TIME_MARKS.items():
        filled += estimate.time.terms[name] * _STEP_WIDTH / estimate.time.total
        bar += mark * (round(filled) - len(bar))
    return bar


def _print_totals(plan: Plan) -> None:
    if plan.tokens is None or not plan.chosen:
        return
    total = compute_totals(plan)
    output.say()
    line = (
        f"{plan.tokens:.3g} tokens: {duration(total['seconds'])} "
        f"({duration(total['low'])} to {duration(total['high'])}), "
        f"{total['gpu_hours']:,.0f} GPU-hours"
    )
    if "energy_mwh" in total:
        line += f", {total['energy_mwh']:,.1f} MWh"
    if "price" in total:
        line += f", price {total['price']:,.0f} {total['currency']}".rstrip()
    output.say(line)


def compute_totals(plan: Plan) -> dict[str, Any]:
    """Return the time, GPU-hours, energy and price of all tokens with the best layout."""
    best, machine = plan.chosen[0], plan.task.machine
    assert plan.tokens is not None  # noqa: S101 - checked by the callers
    seconds = plan.tokens / (best.tokens_per_s_per_gpu * best.layout.gpus)
    low, high = plan.interval.bounds(seconds) if best.predicted_s is None else (seconds, seconds)
    gpu_hours = seconds / 3600 * best.layout.gpus
    result_values: dict[str, Any] = {
        "tokens": plan.tokens,
        "seconds": seconds,
        "low": low,
        "high": high,
        "gpu_hours": gpu_hours,
    }
    if machine.watts is not None:
        result_values["energy_mwh"] = gpu_hours * machine.watts / 1e6
    if machine.price is not None:
        result_values |= {"price": gpu_hours * machine.price, "currency": machine.currency}
    return result_values


def _print_curve(plan: Plan) -> None:
    output.say()
    output.say("scaling, with the same global batch:")
    speeds = [item.tokens_per_s_per_gpu * item.layout.gpus for _, item in plan.curve if item]
    max_speed = max(speeds, default=1.0)
    for nodes, item in plan.curve:
        if item is None:
            output.say(f"{nodes:>6} nodes  does not fit or divide")
            continue
        speed = item.tokens_per_s_per_gpu * item.layout.gpus
        bar = "#" * max(1, round(_WIDTH * speed / max_speed))
        output.say(
            f"{nodes:>6} nodes  {bar:<{_WIDTH}} {speed:,.0f} tokens/s  {item.mfu:.0%} MFU  {item.layout}"
        )


def values(plan: Plan) -> dict[str, Any]:
    """Return a plan as the JSON document that docs/plan.md describes, without its ``schema``."""
    task = plan.task
    document: dict[str, Any] = {
        "model": {
            "name": task.model.name,
            "parameters": task.model.params,
            "active_parameters": task.model.active_params,
            "layers": task.model.layers,
        },
        "machine": {
            "gpu": task.machine.gpu.name,
            "nodes": task.machine.nodes,
            "gpus_per_node": task.machine.gpus_per_node,
            "memory_gib": task.machine.gpu.memory_gib,
            "nic_gb_s_per_gpu": task.machine.nic_gbs,
            "fabric": task.machine.fabric,
        },
        "cluster": plan.cluster,
        "seq_len": task.seq_len,
        "global_batch": task.gbs,
        "framework": task.framework,
        "precision": task.precision,
        "candidates": [candidate_values(item, plan.interval) for item in plan.chosen],
        "ties": list(plan.ties),
        "tried": plan.tried,
        "why": list(plan.why),
        "otherwise": list(plan.others),
        "warnings": list(plan.warnings),
        "unfit": list(plan.unfit),
        "assumed": list(plan.notes),
    }
    if plan.tokens is not None and plan.chosen:
        document["totals"] = compute_totals(plan)
    if plan.curve:
        document["scaling"] = [
            {"nodes": nodes, "best": candidate_values(item, plan.interval) if item else None}
            for nodes, item in plan.curve
        ]
    return document


def candidate_values(estimate: Estimate, interval: Interval) -> dict[str, Any]:
    """Return the JSON object of one layout's estimate."""
    layout = estimate.layout
    seconds = estimate.time.total
    low, high = interval.bounds(seconds) if estimate.predicted_s is None else (seconds, seconds)
    return {
        "layout": {
            **{name: getattr(layout, name) for name in _LAYOUT},
            "shard": layout.shards if layout.zero else 1,
            "text": str(layout),
        },
        "memory_gib": {"total": estimate.memory.total, "terms": estimate.memory.terms},
        "step_time_s": {
            "total": seconds,
            "low": low,
            "high": high,
            "terms": estimate.time.terms,
            "predicted": estimate.predicted_s,
        },
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "fits": estimate.fits,
    }
