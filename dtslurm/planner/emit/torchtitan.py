"""torchtitan's TOML. source: torchtitan/config/job_config.py."""

from __future__ import annotations

from dtslurm.planner.emit.common import summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import Task

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble"}
_FLAVORS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
}


def check(task: Task, layout: Layout) -> list[str]:
    """Return why torchtitan cannot run a layout."""
    found = []
    if not task.model.is_decoder:
        found.append(f"torchtitan trains decoders, which {task.model.name} is not")
    if layout.zero in {1, 2}:
        found.append(f"torchtitan shards everything or nothing: zero={layout.zero}; zero=0 or 3 is valid")
    if layout.shards % layout.cp and layout.zero == 3:
        found.append(f"shard={layout.shards} is no multiple of cp={layout.cp}")
    if task.precision == "fp16":
        found.append("torchtitan trains in bfloat16, not in fp16")
    if layout.offload:
        found.append("torchtitan offloads parameters as well; the layout's offload=1 has no word there")
    return found


def emit(task: Task, layout: Layout) -> str:
    """Return the TOML."""
    shards = layout.shards // layout.cp if layout.zero == 3 else 1
    name, flavor = _FLAVORS.get(task.model.name, ("llama3", task.model.name))
    mode = layout.recompute
    unknown = [] if task.model.name in _FLAVORS else [f"# register the flavor {flavor} with torchtitan first"]
    lines = [
        f"# {summary(task, layout)}",
        *unknown,
        "[model]",
        f'name = "{name}"',
        f'flavor = "{flavor}"',
        "",
        "[training]",
        # with a pipeline, torchtitan cuts the local batch into micro-batches itself
        f"local_batch_size = {layout.mbs if layout.pp == 1 else layout.gbs // layout.dp}",
        f"global_batch_size = {layout.gbs}",
        f"seq_len = {task.seq_len}",
        'mixed_precision_param = "bfloat16"'
        if task.precision != "fp32"
        else 'mixed_precision_param = "float32"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.dp // shards}",
        f"data_parallel_shard_degree = {shards}",
        f"tensor_parallel_degree = {layout.tp}",
        f"pipeline_parallel_degree = {layout.pp}",
        f"context_parallel_degree = {layout.cp}",
        f"expert_parallel_degree = {layout.ep}",
    ]
    if layout.pp > 1:
        schedule = "Interleaved1F1B" if layout.vp > 1 else _SCHEDULES[layout.schedule]
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {layout.mbs}",
        ]
    if layout.vp > 1:
        layers = -(-task.model.layers // (layout.pp * layout.vp))
        lines.append(f"pipeline_parallel_layers_per_stage = {layers}")
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "op"')
    lines += ["", "[compile]", "enable = true"]
    return "\n".join(lines) + "\n"
