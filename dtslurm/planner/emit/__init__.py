"""Emitters: write a layout as the configuration of each framework."""

from __future__ import annotations

from collections.abc import Callable

from dtslurm.planner.emit import accelerate, deepspeed, job, megatron, torchrun, torchtitan
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask

Emitter = Callable[[TrainingTask, Layout], str]
Check = Callable[[TrainingTask, Layout], list[str]]

FORMS: dict[str, tuple[Emitter, Check]] = {
    "torchrun": (torchrun.emit, torchrun.check),
    "deepspeed": (deepspeed.emit, deepspeed.check),
    "megatron": (megatron.emit, megatron.check),
    "torchtitan": (torchtitan.emit, torchtitan.check),
    "torchtitan-0.2": (torchtitan.emit_toml, torchtitan.check),
    "torchtitan-0.3": (torchtitan.emit, torchtitan.check),
    "accelerate": (accelerate.emit, accelerate.check),
    "job": (job.emit, job.check),
}


def check(form: str, task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why a framework cannot run a layout, empty if it can."""
    return FORMS[form][1](task, layout)


def emit(form: str, task: TrainingTask, layout: Layout) -> str:
    """Return the configuration as text that ends in a newline."""
    return FORMS[form][0](task, layout)
