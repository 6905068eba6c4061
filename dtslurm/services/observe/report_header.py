"""Pure functions for the header of a report: the verdict in one line, and the key figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dtslurm.logs.clean import safe
from dtslurm.model.runs.telemetry import FirstFailure, TrainPoint
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import duration, format_short_number, pluralize
from dtslurm.services.observe.curves import Curve, join_attempts
from dtslurm.services.runs.run_times import RunTimes


@dataclass(frozen=True)
class Tile:
    """One key figure: its label, its value, and a note below."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """The verdict in one line.

    Attributes:
        kind: ``good``, ``bad`` or ``plain``; selects the color.
    """

    state: str
    kind: str
    text: str = ""


def run_headline(
    state: str, verdict: Mapping[str, Any] | None, note: str, failure: FirstFailure | None = None
) -> Headline:
    """Return the headline of a run: its state, the cause, and the rank that failed first.

    Args:
        verdict: the result of ``diagnose``; None for a run that did not fail.
        note: text for a run without a verdict.
        failure: the rank that failed first; if the verdict names this rank, its exception is the cause.
    """
    if verdict is None:
        is_completed = state == "COMPLETED"
        return Headline(
            state, "good" if is_completed else "bad" if state.startswith("STALLED") else "plain", note
        )
    error = failure.error if failure is not None and failure.rank == verdict["rank"] else ""
    parts = [safe(error) or str(verdict["cause"])]
    if verdict["rank"] is not None:
        node_text = f" on {verdict['node']}" if verdict.get("node") else ""
        parts.append(f"rank {verdict['rank']}{node_text} failed first")
    elif verdict.get("node"):
        parts.append(f"on {verdict['node']}")
    return Headline(state, "bad", " · ".join(parts))


def describe_attempts(count: int) -> str:
    """Describe how often a run was restarted; empty for a single attempt."""
    return f"after {pluralize(count - 1, 'restart')}" if count > 1 else ""


def time_tile(times: RunTimes | None, limit: int | None, now: float) -> list[Tile]:
    """Return the duration tile, with the time limit and the time between attempts."""
    if times is None:
        return []
    pause = times.pause_s(now)
    notes = [f"limit {duration(limit)}"] if limit else []
    notes += [f"{duration(pause)} of it between attempts"] if pause >= 1 else []
    return [Tile("duration", duration(times.duration_s(now)), ", ".join(notes))]


def training_tiles(attempts: Mapping[int, Sequence[TrainPoint]]) -> list[Tile]:
    """Return the tiles of steps, rate and loss that the training metrics contain."""
    points = [point for points in attempts.values() for point in points]
    steps = [point.step for point in points if point.step is not None]
    total = next((point.total_steps for point in reversed(points) if point.total_steps is not None), None)
    tiles = []
    if steps:
        note = f"of {total:,} ({max(steps) / total:.0%})" if total else ""
        tiles.append(Tile("steps", f"{max(steps):,}", note))
    tiles += _rate_tile(attempts)
    loss = join_attempts(attempts.values(), "loss")
    if loss:
        step, best = min(loss, key=lambda item: item[1])
        tiles.append(
            Tile(
                "last loss",
                format_short_number(loss[-1][1]),
                f"best {format_short_number(best)} at step {step:,}",
            )
        )
    return tiles


def _rate_tile(attempts: Mapping[int, Sequence[TrainPoint]]) -> list[Tile]:
    for metric, label in (("tokens_per_s", "tokens/s"), ("step_time_s", "seconds per step")):
        curve: Curve = join_attempts(attempts.values(), metric)
        if curve:
            return [
                Tile(label, format_short_number(statistics.median(value for _, value in curve)), "median")
            ]
    return []


def size_tiles(ranks: int, nodes: int, gpus: int) -> list[Tile]:
    """Return the tile with the number of GPUs, or of ranks if the run has no GPUs."""
    node_text = f"on {pluralize(nodes, 'node')}" if nodes else ""
    if gpus:
        return [Tile("GPUs", f"{gpus:,}", node_text)]
    return [Tile("ranks", f"{ranks:,}", node_text)]


def cost_tiles(hours: float | None, cost: float | None, currency: str) -> list[Tile]:
    """Return the tile of GPU-hours and their price; none if the GPU-hours are unknown."""
    if hours is None:
        return []
    price = f"{cost:,.2f} {currency}".strip() if cost is not None else ""
    return [Tile("GPU-hours", format_short_number(hours), price)]
