"""GPU-hours of a run and their price, as ``compare`` and ``report`` show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.observe.usage import price
from dtslurm.services.runs.run_times import RunTimes
from dtslurm.services.wiring.context import Context


def count_gpus(document: Mapping[str, Any]) -> int:
    """Return how many GPUs a run holds by its ``job.json``; 0 for a job without."""
    layout = document.get("layout") or {}
    return int(layout.get("nodes") or 0) * int(layout.get("gpus_per_node") or 0)


def count_gpu_hours(gpus: int, times: RunTimes | None, now: float) -> float | None:
    """Return the GPU-hours of all attempts, without the time between them; None for a run without GPUs."""
    return gpus * times.running_s(now) / 3600 if times is not None and gpus else None


def price_gpu_hours(context: Context, record: JobRecord, hours: float | None) -> tuple[float | None, str]:
    """Return what GPU-hours cost and the currency; None and empty where the profile has no price."""
    if hours is None:
        return None, ""
    try:
        each = price(context.cluster(record.cluster).profile, "")
    except DtslurmError:
        return None, ""
    return (round(each[0] * hours, 2), each[1]) if each else (None, "")
