"""Functions that several emitters share."""

from __future__ import annotations

from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask


def only(layout: Layout, who: str, *allowed: str) -> list[str]:
    """Return a problem for each kind of parallelism and recomputation that a configuration cannot express."""
    names_by_key = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    problems = [
        f"{who} has no word for {name} parallelism: {key}={getattr(layout, key)}"
        for key, name in names_by_key.items()
        if key not in allowed and getattr(layout, key) > 1
    ]
    if layout.recompute == "mlp":
        problems.append(f"{who} cannot recompute the MLPs alone (recompute=mlp); give recompute=full")
    return problems


def accumulation(layout: Layout) -> int:
    """Return the gradient accumulation steps: micro-batches per step of one data parallel rank."""
    return layout.micro_batches


def summary(task: TrainingTask, layout: Layout) -> str:
    """Return one line that describes model, machine and layout of a configuration."""
    machine = task.machine
    return (
        f"{task.model.name} on {machine.nodes} x {machine.gpus_per_node} {machine.gpu.name}, sequences of "
        f"{task.seq_len}: {layout}"
    )
