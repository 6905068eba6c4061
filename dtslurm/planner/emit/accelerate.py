"""Accelerate's configuration file. source: accelerate/commands/config/config_args.py."""

from __future__ import annotations

from dtslurm.planner.emit.common import accumulation, only, summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why Accelerate's configuration cannot express a layout."""
    problems = only(layout, "Accelerate's file", "tp")
    if layout.tp > 1 and layout.zero != 3:
        problems.append(f"Accelerate combines tp={layout.tp} with FSDP2 alone; zero=3 is valid")
    if layout.zero in {1, 2} and task.framework != "deepspeed":
        problems.append(f"FSDP2 shards everything or nothing: zero={layout.zero}; zero=0 or 3 is valid")
    return problems


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the YAML configuration."""
    machine = task.machine
    precision = {"fp32": "no"}.get(task.precision, task.precision)
    distributed_type = "MULTI_GPU" if machine.gpus > 1 else "NO"
    lines = [f"# {summary(task, layout)}", "compute_environment: LOCAL_MACHINE", "debug: false"]
    plugin_lines: list[str] = []
    if task.framework == "deepspeed":
        distributed_type = "DEEPSPEED"
        plugin_lines = [
            "deepspeed_config:",
            f"  gradient_accumulation_steps: {accumulation(layout)}",
            f"  zero_stage: {layout.zero}",
            f"  offload_optimizer_device: {'cpu' if layout.offload else 'none'}",
            "  offload_param_device: none",
            "  gradient_clipping: 1.0",
        ]
        if layout.zero == 3:
            plugin_lines += ["  zero3_init_flag: true", "  zero3_save_16bit_model: true"]
    elif layout.zero == 3:
        distributed_type = "FSDP"
        plugin_lines = [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {'true' if layout.recompute == 'full' else 'false'}",
            f"  fsdp_offload_params: {'true' if layout.offload else 'false'}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
        if layout.tp > 1 or layout.shards < layout.dp:
            plugin_lines += [
                "parallelism_config:",
                f"  parallelism_config_dp_replicate_size: {layout.dp // layout.shards}",
                f"  parallelism_config_dp_shard_size: {layout.shards}",
                f"  parallelism_config_tp_size: {layout.tp}",
            ]
    lines += [
        f"distributed_type: {distributed_type}",
        f"mixed_precision: '{precision}'",
        f"num_machines: {machine.nodes}",
        f"num_processes: {machine.gpus}",
        "machine_rank: 0",
        "main_training_function: main",
        "rdzv_backend: c10d" if machine.nodes > 1 else "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
        *plugin_lines,
    ]
    return "\n".join(lines) + "\n"
