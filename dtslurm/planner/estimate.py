"""One layout's memory, time and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.memory import MemoryUse, memory_use
from dtslurm.planner.shapes import ModelShape
from dtslurm.planner.step import StepTime, Timer

# how much of a GPU's memory a plan may fill: Megatron-LM's allocator peaks are steady, eager ones are not
FILL = {"megatron": 0.92, "megatron-2021": 0.92, "torchtitan": 0.9, "jax": 0.92}
FILL_OTHERS = 0.9


@dataclass(frozen=True)
class Estimate:
    """What is expected of a layout.

    Attributes:
        tflops_per_gpu: model FLOPs (6 N + full attention, no recomputation) over time, per GPU.
        fits: memory stays within the share of the GPU that plans may fill.
    """

    layout: Layout
    memory: MemoryUse
    time: StepTime
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    fits: bool


class Estimator:
    """Estimates layouts of one model, machine, sequence length, framework and precision."""

    def __init__(
        self,
        model: ModelShape,
        machine: Machine,
        seq_len: int,
        framework: str,
        precision: str,
        constants: Constants,
    ) -> None:
        self.model = model
        self.machine = machine
        self.seq_len = 1 if model.generic else seq_len
        self.framework = framework
        self.precision = precision
        self.constants = constants
        self.timer = Timer(model, machine, self.seq_len, framework, precision, constants)
        self.limit_gib = machine.gpu.memory_gib * FILL.get(framework, FILL_OTHERS)
        self.flops_per_token = model.flops_per_token(self.seq_len)

    def memory(self, layout: Layout) -> MemoryUse:
        """Return the memory of the fullest GPU."""
        return memory_use(self.model, layout, self.seq_len, self.framework, self.precision, self.constants)

    def estimate(self, layout: Layout, memory: MemoryUse | None = None) -> Estimate:
        """Return everything about one layout."""
        used = memory or self.memory(layout)
        time = self.timer.step(layout)
        speed = layout.gbs * self.seq_len / time.total / layout.gpus
        tflops = speed * self.flops_per_token / 1e12
        return Estimate(
            layout, used, time, speed, tflops, tflops / self.peak_tflops, used.total <= self.limit_gib
        )

    @property
    def peak_tflops(self) -> float:
        """The data sheet's dense peak that MFU is counted against: 8-bit where matrices are 8-bit."""
        gpu = self.machine.gpu
        if self.precision in {"fp8", "fp4"} and gpu.fp8_tflops:
            return gpu.fp8_tflops
        return gpu.bf16_tflops
