"""Every figure that dtslurm holds itself to: what was asked, and what its benchmark last reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FIGURES = Path(__file__).parents[1] / "docs" / "figures.yaml"
Results = Mapping[str, Mapping[str, Any]]


class Reached(NamedTuple):
    """A figure: in words, what was asked, what was reached, whether that is enough (None: not known)."""

    figure: str
    asked: str
    reached: str
    enough: bool | None


def figures() -> dict[str, list[dict[str, Any]]]:
    """Return the figures of `docs/figures.yaml` by chapter."""
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(FIGURES.read_text())
    return found


def reached(figure: Mapping[str, Any], results: Results) -> Reached:
    """Return what was reached of a figure."""
    words, unit = str(figure["figure"]), str(figure.get("unit", ""))
    limit = figure.get("most", figure.get("least", 0))
    asked = str(figure.get("asked") or f"{'≤' if 'most' in figure else '≥'} {_plain(limit)} {unit}")
    if "seen" in figure:
        return Reached(words, asked, str(figure["seen"]), None)
    result = results.get(figure["from"])
    if result is None:
        return Reached(words, asked, f"not measured yet (`{figure['from']}`)", None)
    value = _from_chart(figure, result) if "bar" in figure else _from_text(figure, result)
    if value is None:
        why = "its benchmark failed" if not result["ok"] else "not among what its benchmark told"
        return Reached(words, asked, f"{why} (`{figure['from']}`)", None)
    enough = value <= limit if "most" in figure else value >= limit
    return Reached(words, asked, f"{_plain(value)} {unit}", enough)


def _from_chart(figure: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    for chart in reversed(result.get("charts", ())):
        for bar in chart["bars"]:
            if bar["name"] == figure["bar"] and bar["value"] is not None:
                return float(bar[figure.get("take", "value")])
    return None


def _from_text(figure: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    found = re.findall(figure["find"], result["output"], re.MULTILINE)
    values = [float(one.replace(",", "")) for one in found]
    worst = max if "most" in figure else min
    return worst(values, default=None)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.4g}"
