"""SVG drawing of a plan: memory and step time of the layouts, and the scaling curve."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from dtslurm.planner.estimate import Estimate
from dtslurm.planner.search import TrainingTask

WIDTH, LEFT, BAR, ROW = 960, 20, 22, 46
COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#332288", "#88ccee",
    "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#44aa99", "#661100", "#6699cc",
)  # fmt: skip
Curve = Sequence[tuple[int, Estimate | None]]


def picture(task: TrainingTask, chosen: Sequence[Estimate], curve: Curve) -> str:
    """Return the SVG text; each bar has its values as a tooltip."""
    parts: list[str] = []
    machine = task.machine
    top = 30.0
    title = f"{task.model.name} on {machine.nodes} x {machine.gpus_per_node} {machine.gpu.name}"
    parts.append(_text(LEFT, top, title, 18))
    top = _draw_memory(parts, top + 34, chosen, machine.gpu.memory_gib)
    top = _draw_step_times(parts, top + 30, chosen)
    if any(estimate for _, estimate in curve):
        top = _draw_scaling(parts, top + 30, curve)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 20:.0f}" '
        f'viewBox="0 0 {WIDTH} {top + 20:.0f}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(words)}</text>'


def _bar(x: float, y: float, width: float, colour: str, words: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{BAR}" fill="{colour}">'
        f"<title>{escape(words)}</title></rect>"
    )


def _draw_stacked_bar(parts: list[str], y: float, terms: dict[str, float], scale: float, unit: str) -> None:
    x = float(LEFT)
    for colour, (name, value) in zip(COLOURS, terms.items(), strict=False):
        if value > 0:
            label = f"{name.replace('_', ' ')}: {value:.3g} {unit}"
            parts.append(_bar(x, y, value * scale, colour, label))
            x += value * scale


def _draw_legend(parts: list[str], y: float, names: Sequence[str]) -> float:
    x = float(LEFT)
    for colour, name in zip(COLOURS, names, strict=False):
        label = name.replace("_", " ")
        if x + 30 + 7 * len(label) > WIDTH:
            x, y = float(LEFT), y + 18
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 16, y, label))
        x += 30 + 7 * len(label)
    return y + 10


def _draw_memory(parts: list[str], y: float, chosen: Sequence[Estimate], room: float) -> float:
    parts.append(_text(LEFT, y, f"memory of the fullest GPU, GiB; the line is its {room:.0f} GiB", 14))
    widest = max(room, *(estimate.memory.total for estimate in chosen))
    scale = (WIDTH - 2 * LEFT) / widest
    bars_top = y + 10
    for estimate in chosen:
        parts.append(_text(LEFT, y + 24, f"{estimate.layout}: {estimate.memory.total:.1f} GiB"))
        _draw_stacked_bar(parts, y + 28, estimate.memory.terms, scale, "GiB")
        y += ROW
    x = LEFT + room * scale
    parts.append(f'<line x1="{x:.1f}" y1="{bars_top:.0f}" x2="{x:.1f}" y2="{y + 8:.0f}" stroke="red"/>')
    return _draw_legend(parts, y + 26, list(chosen[0].memory.terms))


def _draw_step_times(parts: list[str], y: float, chosen: Sequence[Estimate]) -> float:
    parts.append(_text(LEFT, y, "time of one step, s", 14))
    scale = (WIDTH - 2 * LEFT) / max(item.time.total for item in chosen)
    for item in chosen:
        text = f"{item.layout}: {item.time.total:.3g} s, {item.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        parts.append(_text(LEFT, y + 24, f"{text}, MFU {item.mfu:.1%}"))
        _draw_stacked_bar(parts, y + 28, item.time.terms, scale, "s")
        y += ROW
    return _draw_legend(parts, y + 26, list(chosen[0].time.terms))


def _draw_scaling(parts: list[str], y: float, curve: Curve) -> float:
    parts.append(_text(LEFT, y, "tokens/s of all GPUs by nodes, the global batch kept", 14))
    speeds = [
        (nodes, estimate.tokens_per_s_per_gpu * estimate.layout.gpus if estimate else 0.0)
        for nodes, estimate in curve
    ]
    fastest = max(speed for _, speed in speeds)
    for nodes, speed in speeds:
        label = f"{nodes} nodes: {speed:,.0f} tokens/s" if speed else f"{nodes} nodes: does not fit"
        parts.append(_text(LEFT, y + 26, label))
        parts.append(_bar(240, y + 11, (WIDTH - 260) * speed / fastest, COLOURS[0], label))
        y += BAR + 6
    return y + 10
