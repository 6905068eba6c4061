"""Count and price the GPU-hours of a run for ``compare`` and ``report``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.observe.usage import price
from dtslurm.services.runs.run_times import RunTimes
from dtslurm.services.wiring.context import Context


def count_gpus(document: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a run from its ``job.json``; 0 for a job without GPUs."""
    layout = document.get("layout") or {}
    return int(layout.get("nodes") or 0) * int(layout.get("gpus_per_node") or 0)


def count_gpu_hours(gpus: int, times: RunTimes | None, now: float) -> float | None:
    """Return the GPU-hours of all attempts, without the time between them; None without GPUs or times."""
    return gpus * times.running_s(now) / 3600 if times is not None and gpus else None


def price_gpu_hours(context: Context, record: JobRecord, hours: float | None) -> tuple[float | None, str]:
    """Return the cost of GPU-hours and its currency; None and empty if the profile has no price."""
    if hours is None:
        return None, ""
    try:
        hourly = price(context.cluster(record.cluster).profile, "")
    except DtslurmError:
        return None, ""
    return (round(hourly[0] * hours, 2), hourly[1]) if hourly else (None, "")
