"""Machines and tasks for the tests of the planner."""

from __future__ import annotations

from dtslurm.planner import constants, hardware
from dtslurm.planner.estimate import Estimator
from dtslurm.planner.hardware import Machine
from dtslurm.planner.models import presets
from dtslurm.planner.search import TrainingTask
from dtslurm.planner.setting import Setting

SHIPPED = constants.default()


def nodes(count: int, gpu: str = "H100-80GB") -> Machine:
    """Return so many nodes of a GPU."""
    result = hardware.find_gpu(gpu)
    assert result is not None
    return hardware.machine(result, count)


def estimator(
    model: str = "llama-3-8b",
    count: int = 1,
    *,
    seq_len: int = 4096,
    framework: str = "megatron",
    precision: str = "bf16",
) -> Estimator:
    """Return an estimator for layouts of a preset on this many H100 nodes."""
    return Estimator(Setting(presets.preset(model), nodes(count), seq_len, framework, precision, SHIPPED))


def training_task(
    model: str, count: int, *, seq_len: int = 4096, gbs: int = 256, framework: str = "megatron"
) -> TrainingTask:
    """Return a search task on so many H100 nodes."""
    return TrainingTask(presets.preset(model), nodes(count), seq_len, gbs, framework, "bf16")
