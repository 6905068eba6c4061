"""Utilization of a run's GPUs and CPUs over an attempt, from the telemetry of its nodes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from dtslurm.logs.clean import safe
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import find_worker_host, query_worker
from dtslurm.views.run_page import finite
from dtslurm.worker.lib.json_records import finite_number

COLUMNS = 96
_LIMIT_S = 120.0
_IDLE = 5.0  # percent, as `dtslurm usage` counts it

Percentages = tuple[float | None, ...]
"""A percentage for each span of time, None where there is no sample."""


@dataclass(frozen=True)
class UtilizationRow:
    """The utilization of one GPU, or of one node's CPUs.

    Attributes:
        label: the node, and the GPU or ``cpu``.
        memory: the largest share of the GPU's memory that was in use, 0 to 1; None if not sampled.
        power_w: the GPU's mean power in watts; None if not sampled.
    """

    label: str
    is_gpu: bool
    values: Percentages
    memory: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class UtilizationHistory:
    """The utilization of all GPUs and CPUs of an attempt.

    Attributes:
        begin, end: seconds since the epoch of the first and the last sample.
    """

    begin: float = 0.0
    end: float = 0.0
    rows: tuple[UtilizationRow, ...] = ()

    @property
    def gpus(self) -> tuple[UtilizationRow, ...]:
        """The rows of GPUs."""
        return tuple(row for row in self.rows if row.is_gpu)

    @property
    def main_rows(self) -> tuple[UtilizationRow, ...]:
        """The rows of GPUs, or the rows of CPUs if no GPU was sampled."""
        return self.gpus or self.rows

    @property
    def unit(self) -> str:
        """The kind of the main rows: ``GPU`` or ``CPU``."""
        return "GPU" if self.gpus else "CPU"


def read_utilization(
    context: Context, record: JobRecord, *, attempt: int, task: str | None, columns: int = COLUMNS
) -> UtilizationHistory:
    """Return the utilization over an attempt of a run, or of one array task; each row has ``columns`` values.

    Raises:
        TransportError: the samples could not be read on their machine.
    """
    host = find_worker_host(context, record)
    folder = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    request = {"run_dir": folder, "attempt": attempt, "columns": columns}
    return parse_utilization(query_worker(host, "telemetry.utilization_history", request, timeout=_LIMIT_S))


def parse_utilization(answer: Mapping[str, Any]) -> UtilizationHistory:
    """Parse the history in a worker program's answer; values of a wrong type become None or are skipped."""
    rows = answer.get("rows")
    return UtilizationHistory(
        finite_number(answer.get("from")) or 0.0,
        finite_number(answer.get("to")) or 0.0,
        tuple(_parse_row(row) for row in rows if isinstance(row, dict)) if isinstance(rows, list) else (),
    )


def _parse_row(row: Mapping[str, Any]) -> UtilizationRow:
    unit, values = str(row.get("what", "")), row.get("values")
    return UtilizationRow(
        safe(f"{row.get('node', '')} {unit}"),
        unit.startswith("gpu"),
        tuple(map(finite_number, values)) if isinstance(values, list) else (),
        finite_number(row.get("memory")),
        finite_number(row.get("power_w")),
    )


def summarize_utilization(history: UtilizationHistory) -> list[tuple[str, str]]:
    """Return the mean utilization, the idle time, the memory and the power, each with its label."""
    values = finite(value for row in history.main_rows for value in row.values)
    if not values:
        return []
    summary = [
        (f"mean {history.unit} use", f"{statistics.fmean(values):.0f} %"),
        (f"{history.unit} time idle", f"{sum(value < _IDLE for value in values) / len(values):.0%}"),
    ]
    memory = finite(row.memory for row in history.gpus)
    if memory:
        summary.append(("fullest GPU memory", f"{max(memory):.0%}"))
    power = finite(row.power_w for row in history.gpus)
    if power:
        summary.append(("mean power of a GPU", f"{statistics.fmean(power):.0f} W"))
    return summary
