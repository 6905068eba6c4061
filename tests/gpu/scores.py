"""How far ``plan`` is from what one GPU measured, before and after it is calibrated on one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtslurm.planner.calibrate import Measurement, factors
from dtslurm.planner.constants import default
from dtslurm.planner.estimate import Estimate
from tests.gpu.configurations import Row, plan

STATES = ("weights", "gradients", "master_weights", "optimizer", "gathered_weights")


@dataclass(frozen=True)
class Errors:
    """Of |predicted / measured - 1|: the median, nine of ten are below ``p90``, and the worst."""

    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Errors:
        """Return the errors of ratios of predicted to measured."""
        sizes = sorted(abs(ratio - 1) for ratio in ratios)
        return cls(statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1])


@dataclass(frozen=True)
class Ratios:
    """Predicted over measured, of a configuration: torch's allocated peak, and the step time."""

    memory: float
    time: float


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of configurations that trained."""
    return [row for row in rows if "memory_gib" in row]


def compare(row: Row, expected: Estimate) -> Ratios:
    """Return how a row compares with its estimate."""
    return Ratios(expected.memory.allocated / row["memory_gib"], expected.time.total / row["step_time_s"])


def ratios(rows: Sequence[Row], gpu: str, calibrated_on: Row | None = None) -> list[Ratios]:
    """Return the ratios of rows on a GPU of this name, by the constants as shipped or as calibrated."""
    result = []
    laid_over: Mapping[str, float] = {}
    if calibrated_on is not None:
        laid_over = factors_of(calibrated_on, gpu)
    for row in rows:
        made = plan(row, gpu)
        estimator = made.task.estimator(default().but(laid_over))
        result.append(compare(row, estimator.estimate(made.chosen[0].layout)))
    return result


def factors_of(row: Row, gpu: str) -> dict[str, float]:
    """Return the constants that `plan --calibrate` would lay over the shipped ones for a run."""
    made = plan(row, gpu)
    expected = made.chosen[0]
    name = made.task.machine.gpu.name
    measurement = Measurement(
        job="",
        model=row["name"],
        gpu=name,
        framework=row["framework"],
        precision=row["precision"],
        layout=str(expected.layout),
        seq_len=row["seq_len"],
        predicted_step_s=expected.time.total,
        measured_step_s=row["step_time_s"],
        predicted_memory_gib=expected.memory.allocated,
        memory_states_gib=sum(expected.memory.terms[term] for term in STATES),
        measured_memory_gib=row["memory_gib"],
    )
    return factors([measurement], name, row["framework"], row["precision"])
