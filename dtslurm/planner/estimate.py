"""Estimates of a layout: memory, time, throughput and MFU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.layout import Layout
from dtslurm.planner.memory import MemoryUse, memory_use
from dtslurm.planner.setting import Setting
from dtslurm.planner.step import StepTime, Timer

# Share of a GPU's memory that a plan may fill. The allocator peaks of Megatron-LM are steady, those of eager
# frameworks are not. Of Ultra-Scale's rows used for the fit, 0.94 rejects the same crashed rows as 0.75, and
# keeps 98 % of the rows that ran. torchtitan's allocator grows its segments in place (expandable_segments):
# JUPITER's runs filled 0.96.
FILL = {"megatron": 0.94, "megatron-2021": 0.94, "nanotron": 0.94, "torchtitan": 0.94, "jax": 0.92}
FILL_OTHERS = 0.9


@dataclass(frozen=True)
class Estimate:
    """The estimate of a layout.

    Attributes:
        tflops_per_gpu: model FLOPs (6 N + full attention, no recomputation) over time, per GPU.
        fits: whether the memory is within the share of the GPU that a plan may fill.
        predicted_s: the predicted seconds of a step if ``time`` was measured, else None.
    """

    layout: Layout
    memory: MemoryUse
    time: StepTime
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    fits: bool
    predicted_s: float | None = None

    def with_measured_time(self, seconds: float) -> Estimate:
        """Return the estimate with a measured time of a step, in which each term keeps its share."""
        ratio = seconds / self.time.total
        return replace(
            self,
            time=StepTime({term: value * ratio for term, value in self.time.terms.items()}),
            tokens_per_s_per_gpu=self.tokens_per_s_per_gpu / ratio,
            tflops_per_gpu=self.tflops_per_gpu / ratio,
            mfu=self.mfu / ratio,
            predicted_s=self.time.total,
        )


class Estimator:
    """Estimates layouts of one model, machine, sequence length, framework and precision."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.model
        self.machine = setting.machine
        self.seq_len = 1 if self.model.generic else setting.seq_len
        self.framework = setting.framework
        self.precision = setting.precision
        self.frozen = setting.frozen
        self.constants = setting.constants
        self._setting = replace(setting, seq_len=self.seq_len)
        self.timer = Timer(self._setting)
        self.limit_gib = self.machine.gpu.memory_gib * FILL.get(
            FRAMEWORKS[self.framework].family, FILL_OTHERS
        )
        self.flops_per_token = self.model.flops_per_token(self.seq_len, frozen=self.frozen)

    def memory(self, layout: Layout, *, first_stage: bool = False) -> MemoryUse:
        """Return the memory of the fullest GPU, or of the first stage, which rank 0 reports."""
        return memory_use(self._setting, layout, first_stage=first_stage)

    def estimate(self, layout: Layout, memory: MemoryUse | None = None) -> Estimate:
        """Return the full estimate of a layout; ``memory`` is computed if it is not given."""
        memory_needed = memory or self.memory(layout)
        time = self.timer.step(layout)
        tokens_per_s = layout.gbs * self.seq_len / time.total / layout.gpus
        tflops = tokens_per_s * self.flops_per_token / 1e12
        return Estimate(
            layout,
            memory_needed,
            time,
            tokens_per_s,
            tflops,
            tflops / self.peak_tflops,
            memory_needed.total <= self.limit_gib,
        )

    @property
    def peak_tflops(self) -> float:
        """The data sheet's dense peak that MFU refers to: the 8-bit peak if matrix products are 8-bit."""
        gpu = self.machine.gpu
        if self.precision in {"fp8", "fp4"} and gpu.fp8_tflops:
            return gpu.fp8_tflops
        return gpu.bf16_tflops
