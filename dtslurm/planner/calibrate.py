"""What a cluster's own runs say of the planner: factors on time and on memory, from a few measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtslurm.planner.frameworks import FRAMEWORKS

BOUNDS = (0.25, 4.0)  # beyond that it is not the same thing that was measured


@dataclass(frozen=True)
class Measurement:
    """One run: what was predicted with the constants as shipped, and what was measured.

    Attributes:
        memory_states_gib: what of the predicted memory is weights, gradients and optimizer, which are exact.
        predicted_memory_gib, measured_memory_gib: torch's allocated peak of the fullest GPU; None if not
            measured.
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
    """Return the constants that bring predictions onto the measurements of one GPU, framework and precision.

    Several measurements count alike (geometric mean). Time as a whole is scaled; of memory the activations
    alone, for states are exact.
    """
    family = FRAMEWORKS[framework].family
    like = [
        item
        for item in measurements
        if item.gpu == gpu and FRAMEWORKS[item.framework].family == family and item.precision == precision
    ]
    found = [ratios(item) for item in like]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: _mean([each[name] for each in found if name in each]) for name in names}


def ratios(item: Measurement) -> dict[str, float]:
    """Return what was measured over what was predicted, by the constant that it scales."""
    found: dict[str, float] = {}
    if item.measured_step_s:
        found["time_scale"] = item.measured_step_s / item.predicted_step_s
    if item.measured_memory_gib:
        predicted = max(1e-9, item.predicted_memory_gib - item.memory_states_gib)
        found["activation_scale"] = (item.measured_memory_gib - item.memory_states_gib) / predicted
    return found


def _mean(ratios: list[float]) -> float:
    low, high = BOUNDS
    return math.exp(sum(math.log(min(high, max(low, ratio))) for ratio in ratios) / len(ratios))
