"""Calibration of the planner: factors on time and memory from a few measured runs of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtslurm.planner.frameworks import FRAMEWORKS

BOUNDS = (0.25, 4.0)  # ratios beyond these bounds come from a measurement of something else


@dataclass(frozen=True)
class Measurement:
    """One run: its measured values, and the predictions with the default constants.

    Attributes:
        memory_states_gib: predicted memory of weights, gradients and optimizer states, which is exact.
        predicted_memory_gib, measured_memory_gib: torch's peak allocated memory of the fullest GPU; None if
            not measured.
    """

    job: str
    model: str
    gpu: str
    framework: str
    precision: str
    layout: str
    seq_len: int
    predicted_step_s: float
    measured_step_s: float | None
    predicted_memory_gib: float
    memory_states_gib: float
    measured_memory_gib: float | None


def factors(
    measurements: Iterable[Measurement], gpu: str, framework: str, precision: str
) -> dict[str, float]:
    """Return the constants that fit predictions to measurements of one GPU, framework and precision.

    Measurements have equal weight (geometric mean). The total time is scaled. Of the memory, only the
    activations are scaled, because the states are exact.
    """
    family = FRAMEWORKS[framework].family
    matching = [
        measurement
        for measurement in measurements
        if measurement.gpu == gpu
        and FRAMEWORKS[measurement.framework].family == family
        and measurement.precision == precision
    ]
    matching_ratios = [ratios(measurement) for measurement in matching]
    names = dict.fromkeys(name for run_ratios in matching_ratios for name in run_ratios)
    return {
        name: _bounded_mean([run_ratios[name] for run_ratios in matching_ratios if name in run_ratios])
        for name in names
    }


def ratios(item: Measurement) -> dict[str, float]:
    """Return the ratios of measured to predicted values, by the constant that each ratio scales."""
    ratio_by_constant: dict[str, float] = {}
    if item.measured_step_s:
        ratio_by_constant["time_scale"] = item.measured_step_s / item.predicted_step_s
    if item.measured_memory_gib:
        predicted = max(1e-9, item.predicted_memory_gib - item.memory_states_gib)
        ratio_by_constant["activation_scale"] = (
            item.measured_memory_gib - item.memory_states_gib
        ) / predicted
    return ratio_by_constant


def _bounded_mean(ratios: list[float]) -> float:
    low, high = BOUNDS
    return math.exp(sum(math.log(min(high, max(low, ratio))) for ratio in ratios) / len(ratios))
