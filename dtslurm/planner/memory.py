"""Memory of the fullest GPU, term by term, in bytes.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), written out per tensor so that grouped queries,
gated MLPs, experts and latent attention fall out of the same sum; for GPT's shape it is their
``s b h (34 + 5 a s / h)``, or ``34 s b h / t`` with selective recomputation and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import FRAMEWORKS, Framework, states
from dtslurm.planner.layout import Layout, Recompute
from dtslurm.planner.shapes import ModelShape, Stack

GIB = 1024**3
TERMS = (
    "weights",
    "gradients",
    "master_weights",
    "optimizer",
    "gathered_weights",
    "activations",
    "logits",
    "buffers",
    "fragmentation",
    "context",
)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one GPU in GiB by term; :attr:`total` is what the device must hold.

    ``allocated`` is what torch calls the peak of allocated memory: all but fragmentation and context.
    """

    terms: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Everything the GPU must hold."""
        return sum(self.terms.values())

    @property
    def allocated(self) -> float:
        """Torch's ``max_memory_allocated``."""
        return self.total - self.terms["fragmentation"] - self.terms["context"]

    @property
    def reserved(self) -> float:
        """Torch's ``max_memory_reserved``."""
        return self.total - self.terms["context"]


@dataclass(frozen=True)
class StageLoad:
    """What the fullest pipeline stage holds: parameters by kind, and layers' worth of activations."""

    dense: float
    experts: float
    embeddings: float
    layers: float


def activation_bytes(
    stack: Stack, hidden: int, framework: Framework, layout: Layout, precision: str = "bf16"
) -> tuple[float, float]:
    """Return bytes per token and layer: what stays with nothing recomputed, and what selective frees of it.

    ``per token`` is per token of the micro-batch on this GPU's context-parallel slice, before the non-flash
    scores, which grow with the sequence and are added by the caller.
    """
    att, tp = stack.attention, layout.tp
    spread = tp if layout.sp else 1
    heads = att.heads * (2 * att.head_dim if att.kv_rank else att.head_dim)
    values = att.heads * att.value_dim
    keys = (att.heads if att.kv_rank else att.kv_heads) * (att.head_dim + att.value_dim)
    drop = 1.0 if framework.dropout else 0.0
    # inputs of norms and column-parallel products: whole on each rank unless split along the sequence
    # bytes of an input that a matrix product keeps; 8-bit recipes keep it in 8 bits, the rest in 16
    kept = 1.0 if precision in {"fp8", "fp4"} else 2.0
    outside = (2 * stack.norms + 2 * drop) * hidden / spread + 2 * kept * hidden / spread
    inside = (2 * (heads + keys) + 2 * values + (kept if kept < 2 else 0) * values) / tp
    if att.kv_rank:
        outside += 4 * (att.q_rank + att.kv_rank + att.rope_dim)
    if stack.cross:
        inside *= 2
        outside += 2 * hidden / spread
    if stack.experts:
        up = (2 if stack.gated else 1) + 1
        routed = stack.experts.top_k * ((2 * up - 2 + kept) * stack.experts.ffn + 2 * kept * hidden)
        shared = (2 * up - 2 + kept) * stack.experts.shared_ffn
        mlp = (routed + shared) / tp
        freed = 2 * stack.experts.top_k * stack.experts.ffn / tp
    else:
        up = (2 if stack.gated else 1) + 1
        mlp = (2 * up - 2 + kept) * stack.ffn / tp
        freed = 0.0
    return outside + inside + mlp, freed


def scores_bytes(stack: Stack, tokens: float, seq_len: int, layout: Layout) -> float:
    """Return bytes of one layer's attention scores where they are stored: 5 a s per token, split by tp."""
    return 5.0 * stack.attention.heads * seq_len * tokens / layout.tp


def held_layers(layers: float, layout: Layout) -> float:
    """Return layers' worth of micro-batches the first stage holds at its fullest.

    1F1B: min(m, p) micro-batches of L/p layers. Interleaved: 1 + (p-1)/(p v) of L (Korthikanti et al., 4.2).
    GPipe holds all m. ZBV halves nothing at one time what 1F1B needs; ZB1P as 1F1B (arXiv:2401.10241).
    """
    p, m = layout.pp, layout.micro_batches
    per_stage = layers / p
    if p == 1:
        return per_stage
    if layout.schedule == "gpipe":
        return per_stage * m
    if layout.vp > 1:
        return per_stage * min(m, p * (1 + (p - 1) / (p * layout.vp)))
    return per_stage * min(m, p)


def stage_load(model: ModelShape, layout: Layout) -> StageLoad:
    """Return what the fullest stage holds: the first, with the embedding; the last where that is larger."""
    p = layout.pp
    tables = model.embedding_params + model.positions + model.extra_params
    dense = (model.layer_params - model.expert_params) / p
    experts = model.expert_params / p
    layers = float(model.layers)
    if p == 1:
        return StageLoad(dense, experts, tables + model.head_params, layers)
    if model.layers % p and (model.layers + 2) % p == 0:
        share = p * ((model.layers + 2) // p - 1) / model.layers
        dense, experts, layers = dense * share, experts * share, layers * share
    elif model.layers % p:
        share = -(-model.layers // p) * p / model.layers
        return StageLoad(dense * share, experts * share, tables, layers * share)
    return StageLoad(dense, experts, max(tables, model.embedding_params if model.head else 0), layers)


def memory_use(
    model: ModelShape,
    layout: Layout,
    seq_len: int,
    framework_name: str,
    precision: str,
    constants: Constants,
    *,
    first_stage: bool = False,
) -> MemoryUse:
    """Return the memory of the fullest GPU under a layout, or of the first stage, which rank 0 reports."""
    FRAMEWORKS[framework_name]
    if model.generic:
        return _generic(model, layout, framework_name, precision, constants)
    load = stage_load(model, layout)
    tp = layout.tp
    local_dense = (load.dense + load.embeddings) / tp
    local_experts = load.experts / min(layout.ep * _expert_tp(layout), layout.tp * layout.ep)
    shards = layout.shards
    expert_shards = max(1, layout.tp * layout.cp * layout.dp // (layout.ep * _expert_tp(layout)))
    expert_shards = min(expert_shards, max(1, shards * tp // layout.ep)) if layout.zero else 1
    terms = dict.fromkeys(TERMS, 0.0)
    names = {
        "weights": "weights",
        "gradients": "gradients",
        "master": "master_weights",
        "optimizer": "optimizer",
    }
    for key, size in states(framework_name, layout.zero, precision).items():
        dense = local_dense * (size.kept + size.shared / shards)
        expert = local_experts * (size.kept + size.shared / expert_shards)
        terms[names[key]] = dense + expert
    if layout.offload:
        terms["optimizer"] = terms["master_weights"] = 0.0
    if layout.zero == 3:
        terms["gathered_weights"] = _gathered(model, layout)
    first, last = _activations(model, layout, load, seq_len, framework_name, precision, constants)
    logits = _logits(model, layout, seq_len, framework_name, constants)
    if layout.pp == 1 or (
        last + logits > first and not first_stage
    ):  # the last stage is the fullest where logits are large
        terms["activations"], terms["logits"] = (first if layout.pp == 1 else last), logits
    else:
        terms["activations"] = first
    terms["buffers"] = _buffers(layout, local_dense + local_experts, framework_name)
    return _finish(terms, framework_name, constants)


def _expert_tp(layout: Layout) -> int:
    """Return by how much tensor parallelism splits an expert: what of tp the experts do not fill."""
    return 1 if layout.ep > 1 else layout.tp


def _finish(terms: dict[str, float], framework: str, constants: Constants) -> MemoryUse:
    for name in ("activations", "logits", "buffers"):
        terms[name] *= constants["activation_scale"]
    passing = sum(terms[name] for name in ("activations", "logits", "buffers", "gathered_weights"))
    terms["fragmentation"] = constants.of("fragmentation", FRAMEWORKS[framework].family) * passing
    terms["context"] = constants.of("context_gib", FRAMEWORKS[framework].family) * GIB
    return MemoryUse({key: value / GIB for key, value in terms.items()})


def _gathered(model: ModelShape, layout: Layout) -> float:
    """Return bytes of gathered 16-bit weights: the layer at work, the next one and the embedding."""
    layer = max(
        (stack.dense_params(model.hidden) + _local_experts(stack, model.hidden, layout)) / layout.tp
        for stack in model.stacks
    )
    return 2.0 * (2 * layer + model.embedding_params / layout.tp)


def _local_experts(stack: Stack, hidden: int, layout: Layout) -> float:
    if not stack.experts:
        return 0.0
    return stack.experts.count * stack.expert_params(hidden) / layout.ep


def _activations(
    model: ModelShape,
    layout: Layout,
    load: StageLoad,
    seq_len: int,
    framework_name: str,
    precision: str,
    constants: Constants,
) -> tuple[float, float]:
    """Return bytes of activations on the first stage, and on the last, which holds one micro-batch."""
    framework = FRAMEWORKS[framework_name]
    tokens = layout.mbs * seq_len / layout.cp
    factor = constants.of("activation_factor", framework.family)
    spread = layout.tp if layout.sp else 1
    kept = working = 0.0
    for stack in model.stacks:
        share = stack.count / model.layers
        full, freed = activation_bytes(stack, model.hidden, framework, layout, precision)
        scores = 0.0 if framework.flash else scores_bytes(stack, tokens, seq_len, layout)
        everything = tokens * full * factor + scores
        working = max(working, everything)
        kept += (
            share
            * {
                "none": everything,
                "selective": everything - scores - tokens * freed * factor
                if framework.name != "torchtitan" or stack.experts
                else everything * constants["selective_op_kept"],
                "full": 2 * tokens * model.hidden / spread,
            }[layout.recompute]
        )
    again = working if layout.recompute == "full" else 0.0
    return kept * held_layers(load.layers, layout) + again, kept * load.layers / layout.pp + again


def _logits(model: ModelShape, layout: Layout, seq_len: int, framework: str, constants: Constants) -> float:
    """Return bytes of logits and their gradient on the stage with the head."""
    if not model.vocab or not model.head:
        return 0.0
    tokens = layout.mbs * seq_len / layout.cp
    return constants.of("logit_bytes", FRAMEWORKS[framework].family) * tokens * model.vocab / layout.tp


def _buffers(layout: Layout, params: float, framework: str) -> float:
    """Return bytes of communication buckets: DeepSpeed's two of 5e8 elements, elsewhere within gradients."""
    if framework == "deepspeed" and layout.zero:
        return 2.0 * min(5e8, params) * 2
    return 0.0


def _generic(
    model: ModelShape, layout: Layout, framework: str, precision: str, constants: Constants
) -> MemoryUse:
    assert model.generic is not None  # noqa: S101 - the caller looked
    terms = dict.fromkeys(TERMS, 0.0)
    names = {
        "weights": "weights",
        "gradients": "gradients",
        "master": "master_weights",
        "optimizer": "optimizer",
    }
    for key, size in states(framework, layout.zero, precision).items():
        terms[names[key]] = model.generic.params * (size.kept + size.shared / layout.shards)
    kept = {"none": 1.0, "selective": 0.7, "full": 0.25}[layout.recompute]
    terms["activations"] = model.generic.activation_bytes * layout.mbs * kept
    return _finish(terms, framework, constants)


def recompute_modes(framework: str) -> tuple[Recompute, ...]:
    """Return the modes worth trying: with flash attention selective frees little but the experts' inputs."""
    return ("none", "full") if FRAMEWORKS[framework].flash else ("none", "selective", "full")
