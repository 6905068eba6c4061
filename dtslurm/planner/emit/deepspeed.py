"""DeepSpeed's JSON. source: deepspeed.ai/docs/config-json and deepspeed/runtime/zero/config.py."""

from __future__ import annotations

import json
from typing import Any

from dtslurm.planner.emit.common import accumulation, only
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why DeepSpeed's JSON cannot express a layout; the model implements tp itself."""
    problems = only(layout, "DeepSpeed's JSON", "tp")
    if task.precision == "fp8":
        problems.append("DeepSpeed's JSON has no 8-bit precision; bf16 and fp16 are valid")
    return problems


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the JSON configuration."""
    zero_config: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        zero_config |= {"overlap_comm": True, "contiguous_gradients": True}
    if layout.zero in {1, 2}:
        zero_config |= {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    if layout.zero == 3:
        hidden = task.model.hidden or 4096
        zero_config |= {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if 1 < layout.shards < layout.dp:
            zero_config["zero_hpz_partition_size"] = layout.shards
    if layout.offload:
        zero_config["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": layout.gbs,
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": accumulation(layout),
        "gradient_clipping": 1.0,
        "zero_optimization": zero_config,
        "zero_allow_untested_optimizer": True,
    }
    if task.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0}
    elif task.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if layout.recompute != "none":
        config["activation_checkpointing"] = {"partition_activations": layout.tp > 1}
    return json.dumps(config, indent=2) + "\n"
