"""Memory of the fullest GPU by term, in bytes.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198). The sum is written out per tensor, so that it
also covers grouped queries, gated MLPs, experts and latent attention. For GPT's shape, the sum is their
``s b h (34 + 5 a s / h)``, or ``34 s b h / t`` with selective recomputation and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import DEEPSPEED, FRAMEWORKS, FSDP2, Framework, states
from dtslurm.planner.layout import Layout, Recompute
from dtslurm.planner.models.shapes import ModelShape, Stack
from dtslurm.planner.setting import Setting

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
    """Memory of one GPU in GiB by term; :attr:`total` is the memory that the device needs.

    ``allocated`` is torch's peak of allocated memory: all terms except fragmentation and context.
    """

    terms: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All memory that the GPU needs."""
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
    """The load of the fullest pipeline stage: parameters by kind, and its activations in layers."""

    dense: float
    experts: float
    embeddings: float
    layers: float


def activation_bytes(
    stack: Stack, hidden_size: int, framework: Framework, layout: Layout, precision: str = "bf16"
) -> tuple[float, float]:
    """Return bytes per token and layer: without recomputation, and the part that ``selective`` frees.

    The tokens are those of one micro-batch in this GPU's context-parallel slice. The result excludes the
    scores of attention without flash attention, which grow with the sequence; the caller adds them.
    """
    attention, tp = stack.attention, layout.tp
    sequence_shards = tp if layout.sp else 1
    query_width = attention.heads * (2 * attention.head_dim if attention.kv_rank else attention.head_dim)
    value_width = attention.heads * attention.value_dim
    key_value_width = (attention.heads if attention.kv_rank else attention.kv_heads) * (
        attention.head_dim + attention.value_dim
    )
    dropout_bytes = 1.0 if framework.dropout else 0.0
    input_bytes = _input_bytes(precision)
    # Inputs of norms and column-parallel products are whole on each rank, unless split along the sequence.
    outside_tp_bytes = (2 * stack.norms + 2 * dropout_bytes) * hidden_size / sequence_shards
    outside_tp_bytes += 2 * input_bytes * hidden_size / (1 if framework.keeps_gathered else sequence_shards)
    inside_tp_bytes = (
        2 * (query_width + key_value_width)
        + 2 * value_width
        + (input_bytes if input_bytes < 2 else 0) * value_width
    ) / tp
    width_factor = 2 if precision == "fp32" else 1
    eager_bytes = (
        _eager_operator_bytes(stack, hidden_size, sequence_shards, tp, width_factor)
        if framework.eager
        else 0.0
    )
    if attention.kv_rank:
        outside_tp_bytes += 4 * (attention.q_rank + attention.kv_rank + attention.rope_dim)
    if stack.cross:
        inside_tp_bytes *= 2
        outside_tp_bytes += 2 * hidden_size / sequence_shards
    if stack.experts:
        mlp_tensors = (2 if stack.gated else 1) + 1
        routed_bytes = stack.experts.top_k * (
            (2 * mlp_tensors - 2 + input_bytes) * stack.experts.ffn + 2 * input_bytes * hidden_size
        )
        shared_bytes = (2 * mlp_tensors - 2 + input_bytes) * stack.experts.shared_ffn
        mlp_bytes = (routed_bytes + shared_bytes) / tp
        freed_bytes = 2 * stack.experts.top_k * stack.experts.ffn / tp
    else:
        mlp_bytes = _dense_mlp_bytes(stack, tp, precision)
        freed_bytes = 0.0
    return width_factor * (
        outside_tp_bytes + inside_tp_bytes + mlp_bytes
    ) + eager_bytes, width_factor * freed_bytes


def _input_bytes(precision: str) -> float:
    """Return the bytes per element of an input that a matrix product keeps."""
    return 1.0 if precision in {"fp8", "fp4"} else 2.0


def _dense_mlp_bytes(stack: Stack, tp: int, precision: str) -> float:
    """Return the bytes per token that the MLP of a dense layer keeps beside its input; 0 for experts."""
    if stack.experts:
        return 0.0
    tensors = (2 if stack.gated else 1) + 1
    return (2 * tensors - 2 + _input_bytes(precision)) * stack.ffn / tp


def _eager_operator_bytes(
    stack: Stack, hidden_size: int, sequence_shards: int, tp: int, width_factor: int
) -> float:
    """Return the bytes per token and layer that Hugging Face's models keep in addition to fused kernels.

    An RMSNorm keeps its input in 32 bits and the normalized input in the model's precision; a fused kernel
    keeps the input alone. The RMSNorms of queries and keys keep both in addition to what attention keeps. A
    gated MLP keeps the result of its activation function. Sources: LlamaRMSNorm and LlamaMLP in
    transformers/models/llama/modeling_llama.py, q_norm in qwen3/modeling_qwen3.py.

    Args:
        width_factor: 1 for 16-bit training, 2 for 32-bit training.
    """
    attention = stack.attention
    total_bytes = 0.0
    if not stack.norm_bias:
        total_bytes += 4 * stack.norms * hidden_size / sequence_shards
        if attention.qk_norm:
            total_bytes += (
                (4 + 2 * width_factor) * (attention.heads + attention.kv_heads) * attention.head_dim / tp
            )
    if stack.gated:
        experts = stack.experts
        columns = experts.top_k * experts.ffn + experts.shared_ffn if experts else stack.ffn
        total_bytes += 2 * width_factor * columns / tp
    return total_bytes


def selected_bytes(stack: Stack, hidden_size: int, layout: Layout, imbalance: float = 1.0) -> float:
    """Return the bytes per token and layer that torchtitan's ``selective (op)`` does not recompute.

    torchtitan keeps the layer's input, every second matrix product (keys, output projection, the gate's
    partner), the output of attention, and tensors that are scattered along the sequence. It computes the
    grouped products of routed experts again, and keeps what expert parallelism dispatches and combines
    (torchtitan/models/llama4/infra/parallelize.py, _op_sac_save_list; pytorch/torchtitan#1672).

    Args:
        imbalance: tokens that the busiest rank receives for its experts, relative to the mean.
    """
    attention, tp = stack.attention, layout.tp
    sequence_shards = tp if layout.sp else 1
    width = stack.experts.shared_ffn if stack.experts else stack.ffn
    split_bytes = (
        2.0 * (attention.kv_heads * attention.head_dim + attention.heads * attention.value_dim + width) / tp
    )
    if stack.experts and layout.ep > 1:
        split_bytes += 2.0 * 2 * stack.experts.top_k * hidden_size * imbalance / tp
    return (
        split_bytes
        + 2.0 * hidden_size * (1 + (2 / sequence_shards if tp > 1 else 0))
        + 2.0 * hidden_size / sequence_shards
    )


def scores_bytes(stack: Stack, tokens: float, seq_len: int, framework: Framework, layout: Layout) -> float:
    """Return the bytes of one layer's stored attention scores, split by tensor parallelism.

    Each token needs 2 a s bytes for the softmax; with dropout, 1 a s for the mask and 2 a s for the result.
    """
    return (5.0 if framework.dropout else 2.0) * stack.attention.heads * seq_len * tokens / layout.tp


def held_layers(layers: float, layout: Layout) -> float:
    """Return the peak activations of the first stage, in layers times micro-batches.

    1F1B: min(m, p) micro-batches of L/p layers. Interleaved: 1 + (p-1)/(p v) of L (Korthikanti et al., 4.2).
    GPipe holds all m micro-batches. ZBV and ZB1P need as much as 1F1B (arXiv:2401.10241).
    """
    stages, micro_batches = layout.pp, layout.micro_batches
    per_stage = layers / stages
    if stages == 1:
        return per_stage
    if layout.schedule == "gpipe":
        return per_stage * micro_batches
    if layout.vp > 1:
        return per_stage * min(micro_batches, stages * (1 + (stages - 1) / (stages * layout.vp)))
    return per_stage * min(micro_batches, stages)


def stage_load(model: ModelShape, layout: Layout) -> StageLoad:
    """Return the load of the fullest stage: the first with the embedding, or the last if it is larger."""
    stages = layout.pp
    table_params = model.embedding_params + model.positions + model.extra_params
    dense = (model.layer_params - model.expert_params) / stages
    experts = model.expert_params / stages
    layers = float(model.layers)
    if stages == 1:
        return StageLoad(dense, experts, table_params + model.head_params, layers)
    if model.layers % stages and (model.layers + 2) % stages == 0:  # embedding and head count as layers
        share = stages * ((model.layers + 2) // stages - 1) / model.layers
        dense, experts, layers = dense * share, experts * share, layers * share
    elif model.layers % stages:
        share = -(-model.layers // stages) * stages / model.layers
        return StageLoad(dense * share, experts * share, table_params, layers * share)
    return StageLoad(dense, experts, max(table_params, model.embedding_params if model.head else 0), layers)


def memory_use(setting: Setting, layout: Layout, *, first_stage: bool = False) -> MemoryUse:
    """Return the memory of the fullest GPU under a layout.

    Args:
        first_stage: return the memory of the first stage, which rank 0 reports, instead of the fullest.
    """
    model = setting.model
    if model.generic:
        return _generic_memory_use(setting, layout)
    load = stage_load(model, layout)
    tp = layout.tp
    local_dense = (load.dense + load.embeddings) / tp
    local_experts = load.experts / layout.expert_ranks
    terms = dict.fromkeys(TERMS, 0.0)
    terms |= _state_bytes(setting, layout, local_dense, local_experts)
    if layout.gathers:
        bytes_per_param = 4 if setting.precision == "fp32" else 2
        terms["gathered_weights"] = _gathered_weight_bytes(model, layout, bytes_per_param)
    elif layout.zero == 3:
        expert_layer_params = max(_local_expert_params(stack, model.hidden, layout) for stack in model.stacks)
        terms["gathered_weights"] = 2 * (local_dense + 2 * expert_layer_params)
    first_stage_bytes, last_stage_bytes = _activation_bytes_by_stage(setting, layout, load)
    logits = _logit_bytes(setting, layout)
    # The last stage is the fullest if the logits are large.
    if layout.pp == 1 or (last_stage_bytes + logits > first_stage_bytes and not first_stage):
        terms["activations"], terms["logits"] = (
            (first_stage_bytes if layout.pp == 1 else last_stage_bytes),
            logits,
        )
    else:
        terms["activations"] = first_stage_bytes
    if FRAMEWORKS[setting.framework].family == "fsdp" and layout.zero == 3 and layout.micro_batches == 1:
        # The backward pass allocates gradients while it frees activations: the larger of the two is the peak.
        freed_activations = terms["activations"] + terms["logits"]
        terms["gradients"] = max(0.0, terms["gradients"] - freed_activations)
    terms["buffers"] = _bucket_bytes(layout, local_dense + local_experts, setting.framework)
    return _add_overheads(terms, layout, setting.framework, setting.constants)


def _state_bytes(
    setting: Setting, layout: Layout, local_dense: float, local_experts: float
) -> dict[str, float]:
    """Return the bytes of weights, gradients, master weights and moments.

    Args:
        local_dense: dense parameters on the GPU.
        local_experts: parameters of experts on the GPU.
    """
    shards = layout.shards
    expert_shards = max(1, shards * layout.tp // layout.expert_ranks) if layout.zero else 1
    terms = {
        key: local_dense * (size.kept + size.shared / shards)
        + local_experts * (size.kept + size.shared / expert_shards)
        for key, size in states(setting.framework, layout.zero, setting.precision).items()
    }
    framework = FRAMEWORKS[setting.framework]
    if framework.short_moments and any(
        stack.experts and stack.attention.kv_rank for stack in setting.model.stacks
    ):
        terms["optimizer"] /= 2  # DeepSeek recipes: exp_avg_dtype = exp_avg_sq_dtype = bfloat16
    if setting.frozen:
        terms |= dict.fromkeys(("gradients", "master_weights", "optimizer"), 0.0)
        terms["weights"] = 2.0 * (local_dense + local_experts) / (shards if layout.zero == 3 else 1)
    elif layout.zero == 3 and layout.pp > 1 and framework.family in FSDP2:
        # A pipeline stage reduces its gradients after the last micro-batch, and until then sums them in 32
        # bits (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync).
        terms["gradients"] = 4.0 * (local_dense + local_experts)
    if layout.offload:
        terms["optimizer"] = terms["master_weights"] = 0.0
    return terms


def _add_overheads(
    terms: dict[str, float], layout: Layout, framework: str, constants: Constants
) -> MemoryUse:
    for name in ("activations", "logits", "buffers"):
        terms[name] *= constants["activation_scale"]
    transient_bytes = sum(terms[name] for name in ("activations", "logits", "buffers", "gathered_weights"))
    terms["fragmentation"] = constants.of("fragmentation", FRAMEWORKS[framework].family) * transient_bytes
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp * layout.cp, layout.ep))
    terms["context"] = (constants["context_gib"] + constants["nccl_gib"] * groups) * GIB
    return MemoryUse({key: value / GIB for key, value in terms.items()})


def _gathered_weight_bytes(model: ModelShape, layout: Layout, bytes_per_param: int) -> float:
    """Return the bytes of gathered weights: the current layer, the next layer and the embedding."""
    layer_params = max(
        stack.dense_params(model.hidden) / layout.tp + _local_expert_params(stack, model.hidden, layout)
        for stack in model.stacks
    )
    return float(bytes_per_param) * (2 * layer_params + model.embedding_params / layout.tp)


def _local_expert_params(stack: Stack, hidden_size: int, layout: Layout) -> float:
    if not stack.experts:
        return 0.0
    return stack.experts.count * stack.expert_params(hidden_size) / layout.expert_ranks


def _activation_bytes_by_stage(setting: Setting, layout: Layout, load: StageLoad) -> tuple[float, float]:
    """Return the bytes of activations on the first stage, and on the last, which holds one micro-batch."""
    model, seq_len, precision = setting.model, setting.seq_len, setting.precision
    framework, constants = FRAMEWORKS[setting.framework], setting.constants
    tokens = layout.mbs * seq_len / layout.cp
    factor = constants.of("activation_factor", framework.family)
    sequence_shards = layout.tp if layout.sp else 1
    kept_bytes = recomputed_bytes = 0.0
    by_operator = framework.family == "torchtitan" and layout.recompute == "selective"
    for stack in model.stacks:
        bytes_per_token, freed_per_token = activation_bytes(stack, model.hidden, framework, layout, precision)
        score_bytes = 0.0 if framework.flash else scores_bytes(stack, tokens, seq_len, framework, layout)
        all_bytes = tokens * bytes_per_token * factor + score_bytes
        if layout.recompute == "full":
            layer_bytes = (4 if precision == "fp32" else 2) * tokens * model.hidden / sequence_shards
        elif by_operator:
            imbalance = constants["expert_imbalance"]
            layer_bytes = tokens * selected_bytes(stack, model.hidden, layout, imbalance)
        elif layout.recompute == "mlp":
            layer_bytes = all_bytes - tokens * _dense_mlp_bytes(stack, layout.tp, precision) * factor
        elif layout.recompute == "selective":
            layer_bytes = all_bytes - score_bytes - tokens * freed_per_token * factor
        else:
            layer_bytes = all_bytes
        kept_bytes += stack.count / model.layers * layer_bytes
        recomputed_bytes = max(recomputed_bytes, all_bytes - layer_bytes)  # of one layer at a time
    return kept_bytes * held_layers(
        load.layers, layout
    ) + recomputed_bytes, kept_bytes * load.layers / layout.pp + recomputed_bytes


def _logit_bytes(setting: Setting, layout: Layout) -> float:
    """Return the bytes of the logits and their gradient on the stage with the head."""
    model = setting.model
    if not model.vocab or not model.head:
        return 0.0
    tokens = layout.mbs * setting.seq_len / layout.cp
    bytes_per_logit = setting.constants.of("logit_bytes", *FRAMEWORKS[setting.framework].variants)
    return bytes_per_logit * tokens * model.vocab / layout.tp


def _bucket_bytes(layout: Layout, params: float, framework: str) -> float:
    """Return the bytes of communication buckets: two of 5e8 elements in DeepSpeed, 0 in other frameworks."""
    if framework in DEEPSPEED and layout.zero:
        return 2.0 * min(5e8, params) * 2
    return 0.0


def _generic_memory_use(setting: Setting, layout: Layout) -> MemoryUse:
    generic = setting.model.generic
    assert generic is not None  # noqa: S101 - checked by the caller
    terms = dict.fromkeys(TERMS, 0.0)
    for key, size in states(setting.framework, layout.zero, setting.precision).items():
        terms[key] = generic.params * (size.kept + size.shared / layout.shards)
    kept_share = {"none": 1.0, "full": 0.25}.get(layout.recompute, 0.7)
    terms["activations"] = generic.activation_bytes * layout.mbs * kept_share
    return _add_overheads(terms, layout, setting.framework, setting.constants)


def recompute_modes(framework: str) -> tuple[Recompute, ...]:
    """Return the modes to try; with flash attention, ``selective`` frees little but the experts' inputs."""
    return ("none", "full") if FRAMEWORKS[framework].flash else ("none", "selective", "full")
