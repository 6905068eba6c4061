"""Explanations of a plan: why the best layout is best, what others cost, what would fit, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import NEAR, SearchResult, TrainingTask, single_gpu, smallest_nodes

_TERM_NAMES = {
    "matmul": "matrix products",
    "experts": "expert products",
    "attention": "attention",
    "elementwise": "norms and activations",
    "head": "head and loss",
    "recompute": "recomputation",
    "launch": "waiting for the host to launch kernels",
    "tp_comm": "tensor-parallel traffic",
    "cp_comm": "context-parallel traffic",
    "ep_comm": "expert traffic",
    "fsdp_comm": "gathering sharded weights",
    "bubble": "pipeline bubble",
    "pp_comm": "pipeline traffic",
    "dp_comm": "gradient traffic",
    "optimizer": "optimizer",
    "jitter": "waiting for the slowest GPU",
    "overhead": "per-step overhead",
}
TRIAL_STEPS = 10  # of a run that decides between two layouts; the first three do not count
_COMPARED_FIELDS = ("pp", "tp", "cp", "ep", "zero", "shard", "recompute", "vp", "mbs")
_SHARDING_NAMES = {0: "plain data parallel", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def term_words(term: str) -> str:
    """Return the readable name of a time term."""
    return _TERM_NAMES[term]


def share(estimate: Estimate, term: str) -> float:
    """Return a time term's share of the step."""
    return estimate.time.terms[term] / estimate.time.total


def why_best(result: SearchResult) -> list[str]:
    """Return lines on why the first layout ranks first, its time by term, and its free memory."""
    best = result.ranked[0]
    fastest = min(result.ranked, key=lambda item: item.time.total / item.layout.gbs)
    preferred = []
    if fastest is not best:
        number = result.ranked.index(fastest) + 1
        gain = 1 - (fastest.time.total / fastest.layout.gbs) / (best.time.total / best.layout.gbs)
        reason = f"estimates within {NEAR:.0%} are equal, and 1 divides the model less or needs less memory"
        if best.predicted_s is not None:
            reason = "1 was measured, and the order may be the reverse"
        preferred = [f"1 comes first though {number} is {gain:.1%} faster by the estimate: {reason}"]
    overheads = [
        term
        for term in sorted(best.time.terms, key=lambda key: -best.time.terms[key])
        if term not in {"matmul", "attention", "experts", "elementwise", "head"} and share(best, term) >= 0.02
    ]
    compute_share = sum(share(best, key) for key in ("matmul", "experts", "attention", "elementwise", "head"))
    lines = [
        *preferred,
        f"compute is {compute_share:.0%} of the step"
        + (
            "; " + ", ".join(f"{term_words(key)} {share(best, key):.0%}" for key in overheads[:4])
            if overheads
            else ""
        ),
    ]
    limit = result.task.machine.gpu.memory_gib
    lines.append(
        f"memory {best.memory.total:.1f} of {limit:.0f} GiB: {limit - best.memory.total:.1f} GiB to spare"
    )
    return lines


def find_ties(ranked: Sequence[Estimate], factor: float) -> list[int]:
    """Return the numbers, from 2 on, of the layouts whose order with the first may be the reverse.

    The order of two layouts that were both measured is known.

    Args:
        factor: ratio of two predicted times below which measurements may reverse their order.
    """
    first = ranked[0].time.total / ranked[0].layout.gbs
    return [
        number
        for number, item in enumerate(ranked[1:], 2)
        if 1 / factor < item.time.total / item.layout.gbs / first < factor
        and (item.predicted_s is None or ranked[0].predicted_s is None)
    ]


def tie_lines(ranked: Sequence[Estimate], ties: Sequence[int], factor: float, shown_count: int) -> list[str]:
    """Return lines on the layouts that cannot be distinguished from the first, and the cheapest experiment.

    Args:
        ranked: all layouts that fit, best first.
        ties: numbers of those that cannot be distinguished from the first.
        shown_count: number of layouts that the plan shows.
    """
    if not ties:
        return []
    tied_shown = [number for number in ties if number <= shown_count]
    others = len(ties) - len(tied_shown)
    names = _join_numbers(tied_shown)
    if others:
        count = f"{others} more layout{'s' if others > 1 else ''}"
        names = f"{names} and {count}" if names else count
    lines = [
        (
            f"{names} cannot be distinguished from 1: "
            f"measured orders reverse below a difference of {factor - 1:.0%}"
        )
    ]
    if tied_shown:
        to_run = [number for number in (1, *tied_shown) if ranked[number - 1].predicted_s is None]
        seconds = TRIAL_STEPS * sum(ranked[number - 1].time.total for number in to_run)
        lines.append(
            f"{TRIAL_STEPS} steps of {'each of ' if len(to_run) > 1 else ''}{_join_numbers(to_run)} would "
            f"decide: about {max(1, round(seconds / 60))} min, "
            f"{seconds * ranked[0].layout.gpus / 3600:.1f} GPU-hours (--top {to_run[-1]} --probe SCRIPT)"
        )
    return lines


def _join_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def runners_up(result: SearchResult) -> list[str]:
    """Return a line for each alternative to a choice of the best layout, with its cost and main term."""
    best = result.ranked[0]
    lines: list[str] = []
    for name in _COMPARED_FIELDS:
        value = getattr(best.layout, name)
        others = (item for item in result.ranked[1:] if getattr(item.layout, name) != value)
        if name in {"zero", "shard"}:  # a single replica has nothing to shard
            others = (item for item in others if item.layout.dp * item.layout.cp > 1)
        other = next(others, None)
        if other is not None:
            lines.append(_compare(name, best, other))
    for name in ("tp", "pp"):
        value = getattr(best.layout, name)
        if value == 1:
            continue
        fitting = {getattr(item.layout, name) for item in result.ranked}
        tight_layouts = [
            (layout, memory)
            for layout, memory in result.tight
            if getattr(layout, name) < value
            and getattr(layout, name) not in fitting
            and layout.recompute == "full"
        ]
        if tight_layouts:
            layout, memory = tight_layouts[0]
            lines.append(
                f"{name}={getattr(layout, name)}: does not fit, {memory.total:.0f} GiB at least "
                f"({_format_largest_term(memory.terms)})"
            )
    return list(dict.fromkeys(lines))


def _compare(name: str, best: Estimate, other: Estimate) -> str:
    slower = other.time.total / best.time.total - 1
    change = f"{name}={getattr(other.layout, name)}"
    if name == "shard":
        change = f"sharded over {other.layout.shards} GPUs"
    if name == "zero":
        change = _SHARDING_NAMES[other.layout.zero]
    if name == "recompute":
        change = f"recompute={other.layout.recompute}"
    term = max(other.time.terms, key=lambda key: other.time.terms[key] - best.time.terms[key])
    added = other.time.terms[term] - best.time.terms[term]
    if slower < 0.01:
        return f"{change}: as fast ({other.layout}); memory {other.memory.total:.0f} GiB"
    if added <= 0:
        return f"{change}: {slower:.0%} slower ({other.layout})"
    return f"{change}: {slower:.0%} slower; {term_words(term)} {share(other, term):.0%} ({other.layout})"


def _format_largest_term(terms: dict[str, float]) -> str:
    name = max(terms, key=lambda key: terms[key])
    return f"{name.replace('_', ' ')} {terms[name]:.0f} GiB"


def warnings(result: SearchResult) -> list[str]:
    """Return warnings about the best layout."""
    best, task = result.ranked[0], result.task
    lines = layout_warnings(task, best)
    if task.gbs < task.machine.gpus and not task.model.generic:
        lines.append(f"the global batch of {task.gbs} sequences is smaller than the {task.machine.gpus} GPUs")
    return lines


def layout_warnings(task: TrainingTask, estimate: Estimate) -> list[str]:
    """Return warnings about one layout."""
    layout, machine = estimate.layout, task.machine
    lines: list[str] = []
    if layout.tp > machine.domain:
        lines.append(
            f"tp={layout.tp} leaves the node's {machine.domain} GPUs: every layer waits for the network"
        )
    if layout.ep > machine.domain:
        lines.append(f"ep={layout.ep} leaves the node's {machine.domain} GPUs: tokens cross the network")
    if share(estimate, "bubble") > 0.15:
        fix = "more micro-batches (a larger gbs) or vp>1"
        lines.append(f"the pipeline idles {share(estimate, 'bubble'):.0%} of the step; {fix} would help")
    if share(estimate, "fsdp_comm") > 0.15:
        lines.append(
            f"gathering sharded weights takes {share(estimate, 'fsdp_comm'):.0%} of the step; a larger mbs, "
            f"or shard={machine.domain} (copies per node) would help"
        )
    if share(estimate, "launch") > 0.15:
        lines.append("the GPUs wait for the host; a larger mbs, a smaller tp or CUDA graphs would help")
    free_memory = machine.gpu.memory_gib - estimate.memory.total
    if estimate.fits and free_memory < 0.1 * machine.gpu.memory_gib:
        lines.append(
            f"only {free_memory:.1f} GiB to spare; fragmentation may take it: try it before a long run"
        )
    for width, width_name in _matrix_widths(task, layout):
        if width % 64:
            lines.append(f"{width_name} is {width:g} per GPU, no multiple of 64: matrix products run slower")
    return lines


def _matrix_widths(task: TrainingTask, layout: Layout) -> list[tuple[int, str]]:
    widths: dict[str, int] = {}
    for stack in task.model.stacks:
        if not stack.experts:
            widths["the MLP's width"] = stack.ffn // layout.tp
        widths["the heads' width"] = stack.attention.heads * stack.attention.head_dim // layout.tp
    if task.model.hidden:
        widths["the hidden size"] = task.model.hidden
    return [(width, width_name) for width_name, width in widths.items()]


def enough_on_one(task: TrainingTask, constants: Constants) -> str | None:
    """Return a line with the memory and step time on a single GPU, None if the model does not fit on one."""
    if task.machine.gpus == 1:
        return None
    estimate = single_gpu(task, constants)
    if estimate is None:
        return None
    return (
        f"one GPU is enough for the memory ({estimate.memory.total:.0f} GiB with {estimate.layout}): "
        f"{estimate.time.total:.3g} s a step"
    )


def what_would_fit(result: SearchResult, constants: Constants, most_nodes: int = 16384) -> list[str]:
    """Return lines on the memory the model lacks and the changes that would make the model fit."""
    task = result.task
    limit_gib = task.estimator(constants).limit_gib
    if not result.tight:
        return _explain_indivisible_batch(task)
    layout, memory = result.tight[0]
    lines = [
        (
            f"the least any layout needs is {memory.total:.0f} GiB of {limit_gib:.0f} GiB a plan may fill: "
            f"{layout}; the most of it {_format_largest_term(memory.terms)}"
        )
    ]
    nodes = smallest_nodes(task, constants, most_nodes)
    if nodes is not None and nodes > task.machine.nodes:
        lines.append(f"it fits from about {nodes} nodes on")
    elif nodes is not None:
        lines.append(f"it fits on {nodes} nodes with a larger global batch")
    estimator = task.estimator(constants)
    offloaded = next(
        (
            (other, used)
            for other in (replace(item, offload=True) for item, _ in result.tight)
            if (used := estimator.memory(other).total) <= limit_gib
        ),
        None,
    )
    if offloaded:
        lines.append(
            f"with optimizer states in host memory it fits in {offloaded[1]:.0f} GiB: {offloaded[0]}"
        )
    shorter = replace(task, seq_len=task.seq_len // 2)
    if memory.terms["activations"] + memory.terms["logits"] > 0.4 * memory.total and task.seq_len > 512:
        lines.append(f"activations dominate: sequences of {shorter.seq_len}, or a larger tp or cp, need less")
    return lines


def _explain_indivisible_batch(task: TrainingTask) -> list[str]:
    gpus = task.machine.gpus
    return [
        (
            f"no layout divides gbs={task.gbs} sequences over {gpus} GPUs; "
            f"gbs={max(gpus, -(-task.gbs // gpus) * gpus)} would do"
        )
    ]
