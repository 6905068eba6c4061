"""What a process, a machine and a folder hold, and whether that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median


@dataclass(frozen=True)
class Sample:
    """What was held at one moment, between jobs.

    Attributes:
        memory_mib: resident memory of the process that stays.
        files: what it has open.
        threads: that it has.
        children: processes below it.
        connections: of SSH, at the server.
        far: processes of our user on the login node.
        dashboard_mib: resident memory of the dashboard.
        state: files in the user's state and cache folders and in the far side's caches, runs not counted.
    """

    memory_mib: float
    files: int
    threads: int
    children: int
    connections: int
    far: int
    dashboard_mib: float
    state: int


# How much more the last quarter may hold than the second one, for all caches fill in the beginning.
ALLOWED: dict[str, Callable[[float], float]] = {
    "memory_mib": lambda before: 4.0 + 0.06 * before,
    "files": lambda before: 2,
    "threads": lambda before: 1,
    "children": lambda before: 1,
    "connections": lambda before: 1,
    "far": lambda before: 1,
    "dashboard_mib": lambda before: 4.0 + 0.06 * before,
    "state": lambda before: 8,
}


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return for each thing that is held its median in the second and in the last quarter of the time."""
    quarter = max(1, len(samples) // 4)
    parts = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    names = [item.name for item in fields(Sample)]
    return {name: (_middle(parts[0], name), _middle(parts[1], name)) for name in names}


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Return in words what grows."""
    result = []
    for name, (before, after) in growth(samples).items():
        if after > before + ALLOWED[name](before):
            result.append(f"{name} grew from {before:g} to {after:g}")
    return result


def _middle(samples: Sequence[Sample], name: str) -> float:
    return float(median(getattr(sample, name) for sample in samples))
