"""Search over the layouts of a model on a machine: enumerate, filter by memory, and rank by speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.divide import divisors, stages_divide
from dtslurm.planner.estimate import Estimate, Estimator
from dtslurm.planner.frameworks import NEMO
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.memory import MemoryUse, recompute_modes
from dtslurm.planner.models.shapes import ModelShape
from dtslurm.planner.setting import Setting

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
UNSPLIT = {"fsdp", "deepspeed", "jax", "paxml"}  # frameworks whose search uses data parallelism only
NEAR = 0.03  # estimates within this relative difference are equal; the simpler layout ranks first


@dataclass(frozen=True)
class TrainingTask:
    """A training task: model, machine, sequence length, batch, framework and precision.

    Attributes:
        gbs: global batch size, sequences per step of the whole job.
        precision: number format of matrix products: ``bf16``, ``fp16``, ``fp8`` or ``fp32``.
    """

    model: ModelShape
    machine: Machine
    seq_len: int
    gbs: int
    framework: str
    precision: str

    def estimator(self, constants: Constants) -> Estimator:
        """Return an estimator for layouts of this task."""
        return Estimator(
            Setting(self.model, self.machine, self.seq_len, self.framework, self.precision, constants)
        )


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        ranked: estimates of the layouts that fit, best first.
        tight: layouts that do not fit, with the memory they need, least memory first.
        tried: number of layouts whose memory was estimated.
    """

    task: TrainingTask
    ranked: tuple[Estimate, ...]
    tight: tuple[tuple[Layout, MemoryUse], ...]
    tried: int


def default_batch(model: ModelShape, seq_len: int, gpus: int) -> int:
    """Return a usual global batch: half a million tokens for small models, up to 16 M for the largest.

    GPT-3, Llama 2 and Llama 3 used similar batches (0.5 M tokens at 1 B parameters, 4 M at 70 B, 16 M at
    405 B).
    """
    if model.generic:
        return 64 * gpus
    params = model.params / 1e9
    tokens = next(
        size for most, size in ((3, 2**19), (20, 2**20), (100, 2**22), (1e9, 2**24)) if params < most
    )
    sequences = max(1, tokens // seq_len)
    if gpus & (gpus - 1) == 0:
        return max(1 << (sequences.bit_length() - 1), min(gpus, 2 * sequences))
    batch: int = 1 << (sequences.bit_length() - 1)
    # for example, 24 GPUs need a batch that is a multiple of 24
    return -(-batch // gpus) * gpus if batch >= gpus else batch


def tensor_degrees(model: ModelShape, limit: int) -> list[int]:
    """Return the tensor parallel degrees up to ``limit`` that divide heads, hidden size and MLP widths."""
    if model.generic:
        return [1]
    heads = min(stack.attention.heads for stack in model.stacks)
    return [
        tp
        for tp in divisors(heads, limit)
        if model.hidden % tp == 0
        and all(
            stack.attention.heads % tp == 0
            and (stack.attention.kv_heads % tp == 0 or tp % stack.attention.kv_heads == 0)
            and (stack.experts is not None or stack.ffn % tp == 0)
            for stack in model.stacks
        )
    ]


def layouts(task: TrainingTask) -> Iterator[list[Layout]]:
    """Yield groups of layouts that differ only in recomputation, least recomputation first."""
    model, gpus = task.model, task.machine.gpus
    domain = task.machine.domain
    data_parallel_only = task.framework in UNSPLIT or bool(model.generic)
    tensor_degrees_tried = [1] if data_parallel_only else tensor_degrees(model, min(domain, 16, gpus))
    expert_degrees = _expert_degrees(model, task)
    for tp in tensor_degrees_tried:
        if gpus % tp:
            continue
        for cp in _context_degrees(task, tp):
            for pp in _pipeline_degrees(task, gpus // (tp * cp), plain=data_parallel_only):
                dp = gpus // (tp * cp * pp)
                for mbs in MICRO_BATCHES if not model.generic else (1, 4, 16, 64, 256):
                    if task.gbs % (mbs * dp) or (mbs > 1 and cp > 1):
                        continue
                    base = Layout(tp=tp, pp=pp, cp=cp, dp=dp, mbs=mbs, gbs=task.gbs, sp=tp > 1)
                    yield from _layout_variants(task, base, expert_degrees)


def _layout_variants(task: TrainingTask, base: Layout, experts: list[int]) -> Iterator[list[Layout]]:
    modes = recompute_modes(task.framework)
    for zero, shard in _sharding_modes(task, base):
        for ep in experts:
            if (base.tp * base.cp * base.dp) % ep:
                continue
            for vp in _virtual_stage_counts(task.model, base):
                variant = replace(base, zero=zero, shard=shard, ep=ep, vp=vp)
                yield [variant if mode == "none" else replace(variant, recompute=mode) for mode in modes]


def _expert_degrees(model: ModelShape, task: TrainingTask) -> list[int]:
    if not model.is_moe:
        return [1]
    count = min(stack.experts.count for stack in model.stacks if stack.experts)
    return [degree for degree in divisors(count, min(64, task.machine.gpus)) if degree & (degree - 1) == 0]


def _context_degrees(task: TrainingTask, tp: int) -> list[int]:
    if task.model.generic or task.framework in UNSPLIT:
        return [1]
    most = min(max(1, task.seq_len // 4096), task.machine.gpus // tp, 64)
    return [cp for cp in (1, 2, 4, 8, 16, 32, 64) if cp <= most and (cp == 1 or task.seq_len % (2 * cp) == 0)]


def _pipeline_degrees(task: TrainingTask, limit: int, *, plain: bool) -> list[int]:
    if plain or task.model.stacks[0].encoder:
        return [1]
    return [pp for pp in divisors(limit, min(64, task.model.layers)) if stages_divide(task.model, pp)]


def _virtual_stage_counts(model: ModelShape, base: Layout) -> list[int]:
    if base.pp == 1 or base.micro_batches % base.pp:
        return [1]
    most = -(-model.layers // base.pp) + 1
    valid = [vp for vp in range(2, most + 1) if stages_divide(model, base.pp * vp)]
    return [1, *dict.fromkeys((valid[0], valid[len(valid) // 2], valid[-1]))] if valid else [1]


def _sharding_modes(task: TrainingTask, base: Layout) -> list[tuple[int, int]]:
    """Return the (zero, shard) pairs to try: the framework's modes, over all ranks or the ranks of a node."""
    ranks = base.dp * base.cp
    if task.framework in {"megatron", "nanotron", "megatron-2021", "megatron-deepspeed"} | NEMO:
        return [(1, 0)] if ranks > 1 else [(0, 0)]
    if ranks == 1:
        return [(0, 0)]
    ranks_per_domain = max(1, task.machine.domain // base.tp)
    hybrid = (
        [(3, ranks_per_domain)]
        if 1 < ranks_per_domain < ranks and ranks % ranks_per_domain == 0 and task.framework != "deepspeed"
        else []
    )
    if task.framework == "deepspeed":
        return [(1, 0), (2, 0), (3, 0)]
    unsharded = [(0, 0)] if base.tp == base.pp == base.cp == 1 else []
    return [*unsharded, (3, 0), *hybrid]


def search(task: TrainingTask, constants: Constants, *, keep: int = 200) -> SearchResult:
    """Return the best layouts that fit, ranked by time, and those closest to fitting."""
    estimator = task.estimator(constants)
    fitting: list[Estimate] = []
    tight: list[tuple[Layout, MemoryUse]] = []
    tried = 0
    for group in layouts(task):
        for index, layout in enumerate(group):
            tried += 1
            memory = estimator.memory(layout)
            if memory.total <= estimator.limit_gib:
                fitting.append(estimator.estimate(layout, memory))
                break  # more recomputation than needed only costs time
            if index == len(group) - 1:
                tight.append((layout, memory))
    tight.sort(key=lambda item: item[1].total)
    return SearchResult(task, tuple(rank(fitting)[:keep]), tuple(tight[:20]), tried)


def rank(estimates: list[Estimate]) -> list[Estimate]:
    """Return estimates, fastest first; near-equal ones by least splitting, then by least memory."""
    by_speed = sorted(estimates, key=lambda item: item.time.total / item.layout.gbs)
    if not by_speed:
        return by_speed
    best = by_speed[0].time.total / by_speed[0].layout.gbs
    near = [item for item in by_speed if item.time.total / item.layout.gbs <= best * (1 + NEAR)]
    near.sort(key=lambda item: (*complexity(item.layout), item.memory.total))
    return near + by_speed[len(near) :]


def rank_measured(
    ranked: Sequence[Estimate], measured_s: Mapping[str, float], factor: float
) -> tuple[Estimate, ...]:
    """Return ranked estimates with the measured times of some layouts, fastest first.

    The fastest measured layout comes before layouts whose predicted times are shorter by less than
    ``factor``, because a prediction may be off by as much.

    Args:
        measured_s: measured seconds of a step, by the layout's text.
        factor: ratio of two times below which measurements may reverse the predicted order.
    """
    known = [
        item.with_measured_time(measured_s[str(item.layout)]) if str(item.layout) in measured_s else item
        for item in ranked
    ]
    measured = [item for item in known if item.predicted_s is not None]
    if not measured:
        return tuple(ranked)
    known.sort(key=seconds_per_sequence)
    best = min(measured, key=seconds_per_sequence)
    if seconds_per_sequence(known[0]) * factor > seconds_per_sequence(best):
        known.remove(best)
        known.insert(0, best)
    return tuple(known)


def seconds_per_sequence(item: Estimate) -> float:
    """Return the seconds of a step for each sequence of the global batch."""
    return item.time.total / item.layout.gbs


def complexity(layout: Layout) -> tuple[int, ...]:
    """Return a sort key for how much a layout splits: first by pipeline stages, then tensors, then the rest.

    Pipelines are the hardest to run. Sharding over fewer ranks ranks first if memory allows, because sharding
    traffic scales worst. Optimizer states alone (ZeRO-1) are sharded without more traffic.
    """
    shard_ranks = layout.shards if layout.zero > 1 else 1
    return (layout.pp, layout.tp, layout.cp, layout.ep, layout.vp, shard_ranks)


def smallest_nodes(task: TrainingTask, constants: Constants, limit: int) -> int | None:
    """Return the smallest number of nodes (by doubling) on which a layout fits, None if above ``limit``."""
    nodes = 1
    while nodes <= limit:
        gpus = nodes * task.machine.gpus_per_node
        gbs = max(task.gbs, gpus) if task.gbs % gpus == 0 or task.gbs < gpus else task.gbs
        smaller = replace(task, machine=replace(task.machine, nodes=nodes), gbs=gbs)
        estimator = smaller.estimator(constants)
        for group in layouts(smaller):
            if estimator.memory(group[-1]).total <= estimator.limit_gib:
                return nodes
        nodes *= 2
    return None


def single_gpu(task: TrainingTask, constants: Constants) -> Estimate | None:
    """Return the best layout on a single GPU, None if the model does not fit on one GPU."""
    one_gpu_machine = replace(task.machine, nodes=1, gpus_per_node=1, domain=1)
    search_result = search(replace(task, machine=one_gpu_machine, framework=task.framework), constants)
    return search_result.ranked[0] if search_result.ranked else None


def scaling(task: TrainingTask, constants: Constants, nodes: list[int]) -> list[tuple[int, Estimate | None]]:
    """Return the best layout for each number of nodes with the same global batch (strong scaling)."""
    curve: list[tuple[int, Estimate | None]] = []
    for count in nodes:
        search_result = search(replace(task, machine=replace(task.machine, nodes=count)), constants, keep=1)
        curve.append((count, search_result.ranked[0] if search_result.ranked else None))
    return curve
