"""Megatron-LM's arguments. source: megatron/training/arguments.py."""

from __future__ import annotations

from dtslurm.planner.emit.common import summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import ModelShape, Stack
from dtslurm.planner.search import TrainingTask


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why Megatron-LM cannot run a layout."""
    problems = []
    if not task.model.is_decoder:
        problems.append(f"Megatron-LM's GPT arguments describe decoders, which {task.model.name} is not")
    if layout.zero in {2, 3}:
        problems.append(f"zero={layout.zero} is not its distributed optimizer; zero=0 or 1 is valid")
    if task.precision == "fp32":
        problems.append("Megatron-LM is planned for at bf16, fp16 or fp8")
    if layout.schedule != "1f1b":
        problems.append(f"schedule={layout.schedule} has no argument; 1f1b is valid")
    return problems


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the arguments, one per line, for a shell to read from a file."""
    lines = [
        f"# {summary(task, layout)}",
        *_parallel_arguments(layout),
        *_batch_arguments(task, layout),
        *_model_arguments(task.model),
    ]
    return "\n".join(lines) + "\n"


def _parallel_arguments(layout: Layout) -> list[str]:
    lines = [f"--tensor-model-parallel-size {layout.tp}", f"--pipeline-model-parallel-size {layout.pp}"]
    if layout.cp > 1:
        lines.append(f"--context-parallel-size {layout.cp}")
    if layout.ep > 1:
        lines.append(f"--expert-model-parallel-size {layout.ep}")
        lines.append(f"--expert-tensor-parallel-size {layout.etp}")
    if layout.tp > 1 and layout.sp:
        lines.append("--sequence-parallel")
    if layout.zero == 1:
        lines += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if 1 < layout.shards < layout.dp * layout.cp:
        lines.append(f"--num-distributed-optimizer-instances {layout.dp * layout.cp // layout.shards}")
    if layout.recompute == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif layout.recompute == "selective":
        lines.append("--recompute-granularity selective")
    elif layout.recompute == "mlp":
        lines += ["--recompute-granularity selective", "--recompute-modules mlp"]
    if layout.offload:
        lines += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return lines


def _batch_arguments(task: TrainingTask, layout: Layout) -> list[str]:
    lines = [
        f"--micro-batch-size {layout.mbs}",
        f"--global-batch-size {layout.gbs}",
        f"--seq-length {task.seq_len}",
        f"--max-position-embeddings {max(task.seq_len, task.model.seq_len)}",
        "--fp16" if task.precision == "fp16" else "--bf16",
    ]
    if task.precision == "fp8":
        lines.append("--fp8-format hybrid")
    layers = task.model.layers
    if layout.pp > 1 and layers % layout.pp and (layers + 2) % layout.pp == 0:
        lines += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
        layers += 2
    if layout.vp > 1:
        lines.append(f"--num-layers-per-virtual-pipeline-stage {layers // (layout.pp * layout.vp)}")
    return lines


def _model_arguments(model: ModelShape) -> list[str]:
    stack = model.stacks[-1]
    att = stack.attention
    lines = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {att.heads}",
        f"--ffn-hidden-size {model.stacks[0].ffn}",
    ]
    if att.kv_heads != att.heads:
        lines += ["--group-query-attention", f"--num-query-groups {att.kv_heads}"]
    if att.head_dim * att.heads != model.hidden and not att.kv_rank:
        lines.append(f"--kv-channels {att.head_dim}")
    if att.kv_rank:
        lines += [
            "--multi-latent-attention",
            *([f"--q-lora-rank {att.q_rank}"] if att.q_rank else []),
            f"--kv-lora-rank {att.kv_rank}",
            f"--qk-head-dim {att.head_dim - att.rope_dim}",
            f"--qk-pos-emb-head-dim {att.rope_dim}",
            f"--v-head-dim {att.value_dim}",
        ]
    if stack.gated:
        lines.append("--swiglu")
    if not stack.norm_bias:
        lines.append("--normalization RMSNorm")
    if not model.positions:
        lines.append("--position-embedding-type rope")
    if not model.tied:
        lines.append("--untie-embeddings-and-output-weights")
    if not stack.mlp_bias:
        lines.append("--disable-bias-linear")
    return [*lines, *_expert_arguments(stack)]


def _expert_arguments(stack: Stack) -> list[str]:
    if not stack.experts:
        return []
    lines = [
        f"--num-experts {stack.experts.count}",
        f"--moe-router-topk {stack.experts.top_k}",
        f"--moe-ffn-hidden-size {stack.experts.ffn}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if stack.experts.shared_ffn:
        lines.append(f"--moe-shared-expert-intermediate-size {stack.experts.shared_ffn}")
    return lines
