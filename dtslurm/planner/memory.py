"""Memory of the fullest GPU, term by term, in bytes.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), written out per tensor so that grouped queries,
gated MLPs, experts and latent attention fall out of the same sum; for GPT's shape it is their
``s b h (34 + 5 a s / h)``, or ``34 s b h / t`` with selective recomputation and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import DEEPSPEED, FRAMEWORKS, Framework, states
from dtslurm.planner.layout import Layout, Recompute
from dtslurm.planner.models.shapes import ModelShape, Stack

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
    outside = (2 * stack.norms + 2 * drop) * hidden / spread
    outside += 2 * kept * hidden / (1 if framework.keeps_gathered else spread)
    inside = (2 * (heads + keys) + 2 * values + (kept if kept < 2 else 0) * values) / tp
    width = 2 if precision == "fp32" else 1
    eager = _kept_by_operators(stack, hidden, spread, tp, width) if framework.eager else 0.0
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
    return width * (outside + inside + mlp) + eager, width * freed


def _kept_by_operators(stack: Stack, hidden: int, spread: int, tp: int, width: int) -> float:
    """Return the bytes per token and layer that Hugging Face's models keep in addition to fused kernels.

    An RMSNorm keeps its input in 32 bits and the normalised input in the model's precision; a fused kernel
    keeps the input alone. The RMSNorms of queries and keys keep both in addition to what attention keeps. A
    gated MLP keeps the result of its activation function. Sources: LlamaRMSNorm and LlamaMLP in
    transformers/models/llama/modeling_llama.py, q_norm in qwen3/modeling_qwen3.py.

    Args:
        width: 1 for 16-bit training, 2 for 32-bit training.
    """
    att = stack.attention
    kept = 0.0
    if not stack.norm_bias:
        kept += 4 * stack.norms * hidden / spread
        if att.qk_norm:
            kept += (4 + 2 * width) * (att.heads + att.kv_heads) * att.head_dim / tp
    if stack.gated:
        experts = stack.experts
        columns = experts.top_k * experts.ffn + experts.shared_ffn if experts else stack.ffn
        kept += 2 * width * columns / tp
    return kept


def selected_bytes(stack: Stack, hidden: int, layout: Layout) -> float:
    """Return bytes per token and layer that torchtitan's ``selective (op)`` keeps; it runs the rest again.

    Kept are the layer's input, every second matrix product (keys, output projection, the gate's partner),
    what attention returns and what is scattered along the sequence, as torchtitan lists them.
    """
    att, tp = stack.attention, layout.tp
    spread = tp if layout.sp else 1
    split = 2.0 * (att.kv_heads * att.head_dim + att.heads * att.value_dim + stack.ffn) / tp
    return split + 2.0 * hidden * (1 + (2 / spread if tp > 1 else 0)) + 2.0 * hidden / spread


def scores_bytes(stack: Stack, tokens: float, seq_len: int, framework: Framework, layout: Layout) -> float:
    """Return bytes of one layer's attention scores where they are stored, split by tp.

    Per token 2 a s of the softmax, and with dropout 1 a s of its mask and 2 a s of its result.
    """
    return (5.0 if framework.dropout else 2.0) * stack.attention.heads * seq_len * tokens / layout.tp


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
    frozen: bool = False,
) -> MemoryUse:
    """Return the memory of the fullest GPU under a layout, or of the first stage, which rank 0 reports.

    Of ``frozen`` weights nothing but themselves is kept.
    """
    if model.generic:
        return _generic(model, layout, framework_name, precision, constants)
    load = stage_load(model, layout)
    tp = layout.tp
    local_dense = (load.dense + load.embeddings) / tp
    local_experts = load.experts / layout.expert_ranks
    shards = layout.shards
    expert_shards = max(1, shards * tp // layout.expert_ranks) if layout.zero else 1
    terms = dict.fromkeys(TERMS, 0.0)
    for key, size in states(framework_name, layout.zero, precision).items():
        dense = local_dense * (size.kept + size.shared / shards)
        expert = local_experts * (size.kept + size.shared / expert_shards)
        terms[key] = dense + expert
    if FRAMEWORKS[framework_name].short_moments and any(
        s.experts and s.attention.kv_rank for s in model.stacks
    ):
        terms["optimizer"] /= 2  # recipes of the DeepSeek family: exp_avg_dtype = exp_avg_sq_dtype = bfloat16
    if frozen:
        terms |= dict.fromkeys(("gradients", "master_weights", "optimizer"), 0.0)
        terms["weights"] = 2.0 * (local_dense + local_experts) / (shards if layout.zero == 3 else 1)
    if layout.offload:
        terms["optimizer"] = terms["master_weights"] = 0.0
    if layout.gathers:
        terms["gathered_weights"] = _gathered(model, layout, 4 if precision == "fp32" else 2)
    elif layout.zero == 3:
        layer = max(_local_experts(stack, model.hidden, layout) for stack in model.stacks)
        terms["gathered_weights"] = 2 * (local_dense + 2 * layer)
    first, last = _activations(model, layout, load, seq_len, framework_name, precision, constants)
    logits = _logits(model, layout, seq_len, framework_name, constants)
    if layout.pp == 1 or (
        last + logits > first and not first_stage
    ):  # the last stage is the fullest where logits are large
        terms["activations"], terms["logits"] = (first if layout.pp == 1 else last), logits
    else:
        terms["activations"] = first
    if FRAMEWORKS[framework_name].family == "fsdp" and layout.zero == 3 and layout.micro_batches == 1:
        # The backward pass allocates gradients while it frees activations: the larger of the two is the peak.
        passing = terms["activations"] + terms["logits"]
        terms["gradients"] = max(0.0, terms["gradients"] - passing)
    terms["buffers"] = _buffers(layout, local_dense + local_experts, framework_name)
    return _finish(terms, layout, framework_name, constants)


def _finish(terms: dict[str, float], layout: Layout, framework: str, constants: Constants) -> MemoryUse:
    for name in ("activations", "logits", "buffers"):
        terms[name] *= constants["activation_scale"]
    passing = sum(terms[name] for name in ("activations", "logits", "buffers", "gathered_weights"))
    terms["fragmentation"] = constants.of("fragmentation", FRAMEWORKS[framework].family) * passing
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp * layout.cp, layout.ep))
    terms["context"] = (constants["context_gib"] + constants["nccl_gib"] * groups) * GIB
    return MemoryUse({key: value / GIB for key, value in terms.items()})


def _gathered(model: ModelShape, layout: Layout, width: int) -> float:
    """Return bytes of gathered weights: the layer at work, the next one and the embedding."""
    layer = max(
        stack.dense_params(model.hidden) / layout.tp + _local_experts(stack, model.hidden, layout)
        for stack in model.stacks
    )
    return float(width) * (2 * layer + model.embedding_params / layout.tp)


def _local_experts(stack: Stack, hidden: int, layout: Layout) -> float:
    if not stack.experts:
        return 0.0
    return stack.experts.count * stack.expert_params(hidden) / layout.expert_ranks


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
    by_operator = framework.family == "torchtitan" and layout.recompute == "selective"
    for stack in model.stacks:
        full, freed = activation_bytes(stack, model.hidden, framework, layout, precision)
        scores = 0.0 if framework.flash else scores_bytes(stack, tokens, seq_len, framework, layout)
        everything = tokens * full * factor + scores
        working = max(working, everything)
        if layout.recompute == "full":
            stays = (4 if precision == "fp32" else 2) * tokens * model.hidden / spread
        elif by_operator and not stack.experts:
            stays = tokens * selected_bytes(stack, model.hidden, layout)
        elif layout.recompute == "selective":
            stays = everything - scores - tokens * freed * factor
        else:
            stays = everything
        kept += stack.count / model.layers * stays
    again = working if layout.recompute == "full" or by_operator else 0.0
    return kept * held_layers(load.layers, layout) + again, kept * load.layers / layout.pp + again


def _logits(model: ModelShape, layout: Layout, seq_len: int, framework: str, constants: Constants) -> float:
    """Return bytes of logits and their gradient on the stage with the head."""
    if not model.vocab or not model.head:
        return 0.0
    tokens = layout.mbs * seq_len / layout.cp
    return constants.of("logit_bytes", *FRAMEWORKS[framework].variants) * tokens * model.vocab / layout.tp


def _buffers(layout: Layout, params: float, framework: str) -> float:
    """Return bytes of communication buckets: DeepSpeed's two of 5e8 elements, elsewhere within gradients."""
    if framework in DEEPSPEED and layout.zero:
        return 2.0 * min(5e8, params) * 2
    return 0.0


def _generic(
    model: ModelShape, layout: Layout, framework: str, precision: str, constants: Constants
) -> MemoryUse:
    assert model.generic is not None  # noqa: S101 - the caller looked
    terms = dict.fromkeys(TERMS, 0.0)
    for key, size in states(framework, layout.zero, precision).items():
        terms[key] = model.generic.params * (size.kept + size.shared / layout.shards)
    kept = {"none": 1.0, "selective": 0.7, "full": 0.25}[layout.recompute]
    terms["activations"] = model.generic.activation_bytes * layout.mbs * kept
    return _finish(terms, layout, framework, constants)


def recompute_modes(framework: str) -> tuple[Recompute, ...]:
    """Return the modes worth trying: with flash attention selective frees little but the experts' inputs."""
    return ("none", "full") if FRAMEWORKS[framework].flash else ("none", "selective", "full")
