"""The performance targets in `docs/figures.yaml`, and the values that the benchmarks last measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TARGETS = Path(__file__).parents[1] / "docs" / "figures.yaml"
Results = Mapping[str, Mapping[str, Any]]


class Measurement(NamedTuple):
    """A target and the measured value, in words for the page.

    ``met`` is None if nothing was measured. ``reason`` explains why a target is not met.
    """

    figure: str
    target: str
    measured: str
    met: bool | None
    reason: str


def load_targets() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `docs/figures.yaml` by section."""
    sections: dict[str, list[dict[str, Any]]] = yaml.safe_load(TARGETS.read_text())
    return sections


def compare_with_target(row: Mapping[str, Any], results: Results) -> Measurement:
    """Return the measurement for a row of `docs/figures.yaml`."""
    figure, unit, reason = str(row["figure"]), str(row.get("unit", "")), str(row.get("reason", ""))
    limit = row.get("most", row.get("least", 0))
    target = str(row.get("target") or f"{'≤' if 'most' in row else '≥'} {_format(limit)} {unit}".rstrip())
    if "measured" in row:
        return Measurement(figure, target, str(row["measured"]), row["met"], reason)
    benchmark = row["from"]
    result = results.get(benchmark)
    if result is None:
        return Measurement(figure, target, f"not measured yet (`{benchmark}`)", None, reason)
    value = _read_from_chart(row, result) if "bar" in row else _read_from_output(row, result)
    if value is None:
        problem = "not in the output of the benchmark" if result["ok"] else "the benchmark failed"
        return Measurement(figure, target, f"{problem} (`{benchmark}`)", None, reason)
    met = value <= limit if "most" in row else value >= limit
    return Measurement(figure, target, f"{_format(value)} {unit}".rstrip(), met, reason)


def _read_from_chart(row: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    for chart in result.get("charts", ()):
        if row.get("chart", chart["title"]) != chart["title"]:
            continue
        for bar in chart["bars"]:
            if bar["name"] == row["bar"] and bar["value"] is not None:
                return float(bar[row.get("take", "value")])
    return None


def _read_from_output(row: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    matches = re.findall(row["find"], result["output"], re.MULTILINE)
    values = [float(match.replace(",", "")) for match in matches]
    worst = max if "most" in row else min
    return worst(values, default=None)


def _format(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.4g}"
