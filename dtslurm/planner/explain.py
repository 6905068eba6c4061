"""A plan in words: why the best layout won, what others lose, what would make a model fit, what to mind."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import NEAR, SearchResult, TrainingTask, single_gpu, smallest_nodes

_TERM_WORDS = {
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
_DIFFERENCES = ("pp", "tp", "cp", "ep", "zero", "shard", "recompute", "vp", "mbs")
_ZERO = {0: "plain data parallel", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def term_words(term: str) -> str:
    """Return a time term as people say it."""
    return _TERM_WORDS[term]


def share(estimate: Estimate, term: str) -> float:
    """Return a time term's share of the step."""
    return estimate.time.terms[term] / estimate.time.total


def why_best(found: SearchResult) -> list[str]:
    """Return why the first layout is the first, what it spends its time on, and how much memory is left."""
    best = found.ranked[0]
    fastest = min(found.ranked, key=lambda item: item.time.total / item.layout.gbs)
    preferred = []
    if fastest is not best:
        number = found.ranked.index(fastest) + 1
        gain = 1 - (fastest.time.total / fastest.layout.gbs) / (best.time.total / best.layout.gbs)
        reason = f"estimates within {NEAR:.0%} are equal, and 1 divides the model less or needs less memory"
        preferred = [f"1 comes first though {number} is {gain:.1%} faster by the estimate: {reason}"]
    waste = [
        term
        for term in sorted(best.time.terms, key=lambda key: -best.time.terms[key])
        if term not in {"matmul", "attention", "experts", "elementwise", "head"} and share(best, term) >= 0.02
    ]
    computing = sum(share(best, key) for key in ("matmul", "experts", "attention", "elementwise", "head"))
    lines = [
        *preferred,
        f"compute is {computing:.0%} of the step"
        + (
            "; " + ", ".join(f"{term_words(key)} {share(best, key):.0%}" for key in waste[:4])
            if waste
            else ""
        ),
    ]
    room = found.task.machine.gpu.memory_gib
    lines.append(
        f"memory {best.memory.total:.1f} of {room:.0f} GiB: {room - best.memory.total:.1f} GiB to spare"
    )
    return lines


def runners_up(found: SearchResult) -> list[str]:
    """Return a line for each choice that could have been made otherwise: what it costs, and in which term."""
    best = found.ranked[0]
    lines: list[str] = []
    for name in _DIFFERENCES:
        wanted = getattr(best.layout, name)
        others = (item for item in found.ranked[1:] if getattr(item.layout, name) != wanted)
        if name in {"zero", "shard"}:  # one replica has nothing to share
            others = (item for item in others if item.layout.dp * item.layout.cp > 1)
        other = next(others, None)
        if other is not None:
            lines.append(_compare(name, best, other))
    for name in ("tp", "pp"):
        wanted = getattr(best.layout, name)
        if wanted == 1:
            continue
        fitting = {getattr(item.layout, name) for item in found.ranked}
        less = [
            (layout, memory)
            for layout, memory in found.tight
            if getattr(layout, name) < wanted
            and getattr(layout, name) not in fitting
            and layout.recompute == "full"
        ]
        if less:
            layout, memory = less[0]
            lines.append(
                f"{name}={getattr(layout, name)}: does not fit, {memory.total:.0f} GiB at least "
                f"({_largest(memory.terms)})"
            )
    return list(dict.fromkeys(lines))


def _compare(name: str, best: Estimate, other: Estimate) -> str:
    slower = other.time.total / best.time.total - 1
    word = f"{name}={getattr(other.layout, name)}"
    if name == "shard":
        word = f"sharded over {other.layout.shards} GPUs"
    if name == "zero":
        word = _ZERO[other.layout.zero]
    if name == "recompute":
        word = f"recompute={other.layout.recompute}"
    more = max(other.time.terms, key=lambda key: other.time.terms[key] - best.time.terms[key])
    gain = other.time.terms[more] - best.time.terms[more]
    if slower < 0.01:
        return f"{word}: as fast ({other.layout}); memory {other.memory.total:.0f} GiB"
    if gain <= 0:
        return f"{word}: {slower:.0%} slower ({other.layout})"
    return f"{word}: {slower:.0%} slower; {term_words(more)} {share(other, more):.0%} ({other.layout})"


def _largest(terms: dict[str, float]) -> str:
    name = max(terms, key=lambda key: terms[key])
    return f"{name.replace('_', ' ')} {terms[name]:.0f} GiB"


def warnings(found: SearchResult) -> list[str]:
    """Return what to mind about the best layout."""
    best, task = found.ranked[0], found.task
    lines = layout_warnings(task, best)
    if task.gbs < task.machine.gpus and not task.model.generic:
        lines.append(f"the global batch of {task.gbs} sequences is smaller than the {task.machine.gpus} GPUs")
    return lines


def layout_warnings(task: TrainingTask, estimate: Estimate) -> list[str]:
    """Return what to mind about one layout."""
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
    room = machine.gpu.memory_gib - estimate.memory.total
    if estimate.fits and room < 0.1 * machine.gpu.memory_gib:
        lines.append(f"only {room:.1f} GiB to spare; fragmentation may take it: try it before a long run")
    for width, what in _widths(task, layout):
        if width % 64:
            lines.append(f"{what} is {width:g} per GPU, no multiple of 64: matrix products run slower")
    return lines


def _widths(task: TrainingTask, layout: Layout) -> list[tuple[int, str]]:
    found: dict[str, int] = {}
    for stack in task.model.stacks:
        if not stack.experts:
            found["the MLP's width"] = stack.ffn // layout.tp
        found["the heads' width"] = stack.attention.heads * stack.attention.head_dim // layout.tp
    if task.model.hidden:
        found["the hidden size"] = task.model.hidden
    return [(width, what) for what, width in found.items()]


def enough_on_one(task: TrainingTask, constants: Constants) -> str | None:
    """Return a line that says one GPU is enough where it is, and how long it takes against all of them."""
    if task.machine.gpus == 1:
        return None
    alone = single_gpu(task, constants)
    if alone is None:
        return None
    return (
        f"one GPU is enough for the memory ({alone.memory.total:.0f} GiB with {alone.layout}): "
        f"{alone.time.total:.3g} s a step"
    )


def what_would_fit(found: SearchResult, constants: Constants, most_nodes: int = 16384) -> list[str]:
    """Return lines that say how far the model is from fitting and what would make it fit."""
    task = found.task
    room = task.estimator(constants).limit_gib
    if not found.tight:
        return _nothing_divides(task)
    layout, memory = found.tight[0]
    lines = [
        (
            f"the least any layout needs is {memory.total:.0f} GiB of {room:.0f} GiB a plan may fill: "
            f"{layout}; the most of it {_largest(memory.terms)}"
        )
    ]
    nodes = smallest_nodes(task, constants, most_nodes)
    if nodes is not None and nodes > task.machine.nodes:
        lines.append(f"it fits from about {nodes} nodes on")
    elif nodes is not None:
        lines.append(f"it fits on {nodes} nodes with a larger global batch")
    estimator = task.estimator(constants)
    spared = next(
        (
            (other, used)
            for other in (replace(item, offload=True) for item, _ in found.tight)
            if (used := estimator.memory(other).total) <= room
        ),
        None,
    )
    if spared:
        lines.append(f"with optimizer states in host memory it fits in {spared[1]:.0f} GiB: {spared[0]}")
    shorter = replace(task, seq_len=task.seq_len // 2)
    if memory.terms["activations"] + memory.terms["logits"] > 0.4 * memory.total and task.seq_len > 512:
        lines.append(f"activations dominate: sequences of {shorter.seq_len}, or a larger tp or cp, need less")
    return lines


def _nothing_divides(task: TrainingTask) -> list[str]:
    gpus = task.machine.gpus
    return [
        (
            f"no layout divides gbs={task.gbs} sequences over {gpus} GPUs; "
            f"gbs={max(gpus, -(-task.gbs // gpus) * gpus)} would do"
        )
    ]
