"""Calibration of the planner: factors on computation, communication, host time and memory from measured runs.

A run gives one time, so it cannot determine three factors. Each factor is therefore held near 1, the
computation tightly and the other two loosely, as far as published runs of one cluster differ from their
predictions, and several runs with different shares determine the factors together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.step import PARTS

BOUNDS = (0.25, 4.0)  # ratios beyond these bounds come from a measurement of something else
FREEDOM = {
    "compute": 0.2,
    "communication": 0.5,
    "host": 0.5,
}  # standard deviations of the factors' logarithms
NOISE = 0.05  # of a time, by the layout: what no factor of a part explains
_STEPS = 20


@dataclass(frozen=True)
class Measurement:
    """One run: its measured values, and the predictions with the default constants.

    Attributes:
        memory_states_gib: predicted memory of weights, gradients and optimizer states, which is exact.
        predicted_memory_gib, measured_memory_gib: torch's peak allocated memory of the fullest GPU; None if
            not measured.
        predicted_parts_s: the predicted step by part; None in files of older versions, which count it as
            computation.
        nodes: the number of nodes of the run; None in files of older versions.
        failure: why the run could not train with this layout, empty if it could.
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
    predicted_parts_s: dict[str, float] | None = None
    nodes: int | None = None
    failure: str = ""


def matching_measurements(
    measurements: Iterable[Measurement], gpu: str, framework: str, precision: str
) -> list[Measurement]:
    """Return the measurements of one GPU, precision and family of frameworks."""
    family = FRAMEWORKS[framework].family
    return [
        measurement
        for measurement in measurements
        if measurement.gpu == gpu
        and FRAMEWORKS[measurement.framework].family == family
        and measurement.precision == precision
    ]


def factors(
    measurements: Iterable[Measurement], gpu: str, framework: str, precision: str
) -> dict[str, float]:
    """Return the constants that fit predictions to measurements of one GPU, framework and precision.

    Of the memory, only the activations are scaled, because the states are exact; measurements have equal
    weight (geometric mean).
    """
    matching = matching_measurements(measurements, gpu, framework, precision)
    timed = [(_parts(item), ratios(item)["time"]) for item in matching if item.measured_step_s]
    result: dict[str, float] = {}
    if timed:
        low, high = BOUNDS
        times = [sum(parts.values()) * min(high, max(low, ratio)) for parts, ratio in timed]
        scales = part_factors([parts for parts, _ in timed], times)
        result |= {f"{part}_scale": scale for part, scale in scales.items()}
    memory = [ratio["activations"] for ratio in map(ratios, matching) if "activations" in ratio]
    if memory:
        result["activation_scale"] = _bounded_mean(memory)
    return result


def _parts(item: Measurement) -> dict[str, float]:
    return item.predicted_parts_s or {**dict.fromkeys(PARTS, 0.0), "compute": item.predicted_step_s}


def part_factors(parts: Sequence[Mapping[str, float]], times: Sequence[float]) -> dict[str, float]:
    """Return the likeliest factors of a step's parts for measured times (Gauss-Newton on logarithms).

    Args:
        parts: the predicted seconds of each run, by part.
        times: the measured seconds of each run.
    """
    point = dict.fromkeys(PARTS, 0.0)
    for _ in range(_STEPS):
        square = {(part, other): 0.0 for part in PARTS for other in PARTS}
        slope = dict.fromkeys(PARTS, 0.0)
        for part in PARTS:
            square[part, part] += FREEDOM[part] ** -2
            slope[part] -= point[part] * FREEDOM[part] ** -2
        for run, measured in zip(parts, times, strict=True):
            seconds = {part: run[part] * math.exp(point[part]) for part in PARTS}
            total = sum(seconds.values())
            miss = math.log(measured / total)
            for part in PARTS:
                slope[part] += seconds[part] / total * miss * NOISE**-2
                for other in PARTS:
                    square[part, other] += seconds[part] * seconds[other] / total**2 * NOISE**-2
        move = _solve(square, slope)
        longest = max(abs(value) for value in move.values())
        point = {part: point[part] + move[part] * min(1.0, 0.5 / max(longest, 1e-12)) for part in PARTS}
        if longest < 1e-6:
            break
    return {part: math.exp(value) for part, value in point.items()}


def _solve(square: Mapping[tuple[str, str], float], slope: Mapping[str, float]) -> dict[str, float]:
    """Solve a positive definite system of three equations by elimination."""
    rows = [[*(square[part, other] for other in PARTS), slope[part]] for part in PARTS]
    size = len(rows)
    for index in range(size):
        for later in range(index + 1, size):
            share = rows[later][index] / rows[index][index]
            rows[later] = [
                value - share * above for value, above in zip(rows[later], rows[index], strict=True)
            ]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][later] * solution[later] for later in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return dict(zip(PARTS, solution, strict=True))


def ratios(item: Measurement) -> dict[str, float]:
    """Return the ratios of measured to predicted ``time`` and ``activations``, where they were measured."""
    ratio_by_quantity: dict[str, float] = {}
    if item.measured_step_s:
        ratio_by_quantity["time"] = item.measured_step_s / item.predicted_step_s
    if item.measured_memory_gib:
        predicted = max(1e-9, item.predicted_memory_gib - item.memory_states_gib)
        ratio_by_quantity["activations"] = (item.measured_memory_gib - item.memory_states_gib) / predicted
    return ratio_by_quantity


def _bounded_mean(ratios: list[float]) -> float:
    low, high = BOUNDS
    return math.exp(sum(math.log(min(high, max(low, ratio))) for ratio in ratios) / len(ratios))
