"""torchrun's command line, and the device mesh for FSDP2's ``fully_shard``."""

from __future__ import annotations

from dtslurm.planner.emit.common import accumulation, only, summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why plain FSDP2 cannot run a layout."""
    del task
    problems = only(layout, "plain FSDP2", "tp")
    if layout.zero in {1, 2} and layout.shards > 1:
        problems.append(f"FSDP2 shards everything or nothing: zero={layout.zero}; zero=0 or 3 is valid")
    return problems


def mesh(layout: Layout) -> tuple[list[int], list[str]]:
    """Return shape and dimension names for ``init_device_mesh``; the last dimension has adjacent ranks."""
    shape, names = [], []
    shards = layout.shards if layout.zero == 3 else 1
    if layout.dp // shards > 1 or shards == 1:
        shape.append(layout.dp // shards)
        names.append("replicate")
    if shards > 1:
        shape.append(shards)
        names.append("shard")
    if layout.tp > 1:
        shape.append(layout.tp)
        names.append("tp")
    return shape, names


def batch_words(task: TrainingTask, layout: Layout) -> list[str]:
    """Return a training script's arguments for batch sizes and sequence length."""
    return [
        *("--micro-batch-size", str(layout.mbs)),
        *("--gradient-accumulation-steps", str(accumulation(layout))),
        *("--seq-len", str(task.seq_len)),
    ]


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return shell lines: comments with the device mesh, and the torchrun command with script arguments."""
    shape, names = mesh(layout)
    machine = task.machine
    dim_names = ", ".join(f'"{name}"' for name in names)
    lines = [
        f"# {summary(task, layout)}",
        f"# mesh = init_device_mesh('cuda', ({', '.join(map(str, shape))},), mesh_dim_names=({dim_names},))",
    ]
    if layout.zero == 3:
        shard_dims = ", ".join(f'"{name}"' for name in names if name in {"replicate", "shard"})
        policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        lines.append(f"# fully_shard(block, mesh=mesh[{shard_dims}], mp_policy={policy})")
    else:
        lines.append("# DistributedDataParallel(model, gradient_as_bucket_view=True)")
    if layout.recompute == "full":
        lines.append(
            "# torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False) around every block"
        )
    lines += [
        f"torchrun --nnodes={machine.nodes} --nproc-per-node={machine.gpus_per_node} train.py \\",
        f"  {' '.join(batch_words(task, layout))}",
    ]
    return "\n".join(lines) + "\n"
