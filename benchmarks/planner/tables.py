"""The measured rows, the laboratories that measured them, and the rows whose speed is not scored."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dtslurm.planner.measured.evaluate import RowPrediction

HERE = Path(__file__).parent
TABLES = ("runs.csv", "runs_ultrascale.csv", "runs_vtrain_single.csv", "runs_other.csv")

QUALITY = {  # values of the column ``quality`` whose speed is not scored
    "memory": "figure quoted from memory",
    "length": "sequences shorter than the stated length",
    "input": "limited by one process of a data loader",
    "peak": "faster than the chip's best measured product",
}


@cache
def sources() -> dict[str, dict[str, str]]:
    """Return the laboratory and the framework of each table (``sources.json``)."""
    document: dict[str, Any] = json.loads((HERE / "sources.json").read_text("utf-8"))
    tables: dict[str, dict[str, str]] = document["tables"]
    return tables


def laboratory(row: Mapping[str, str]) -> str:
    """Return the laboratory that measured a row."""
    return sources()[row["source"]]["laboratory"]


def rows() -> list[dict[str, str]]:
    """Return every measured row, with the framework that its table names once for all rows."""
    result: list[dict[str, str]] = []
    for name in TABLES:
        with (HERE / "data" / name).open(encoding="utf-8", newline="") as stream:
            result += [
                {**row, "framework": sources()[row["source"]]["framework"]} for row in csv.DictReader(stream)
            ]
    return result


def reason_not_scored(item: RowPrediction) -> str:
    """Return why the speed of a row is not scored; empty if it is, or if the row has no speed.

    The filtered rows of nanotron spend a fixed 60 to 200 ms per micro-batch, which the Ultra-Scale Playbook
    attributes to older code, or ran at the edge of memory.
    """
    if item.speed_error is None or item.case is None:
        return ""
    if reason := QUALITY.get(item.row.get("quality") or ""):
        return reason
    if item.case.framework != "nanotron":
        return ""
    layout = item.case.layout
    if layout.tp > 8:
        return "nanotron, tp over more than a node"
    if layout.tp > 1 and layout.pp > 1:
        return "nanotron, tp and pp at once"
    return "nanotron, below 5 % MFU" if float(item.row.get("mfu_pct") or 0) < 5 else ""


def is_scored(item: RowPrediction) -> bool:
    """Return whether the speed of a row is scored."""
    return item.speed_error is not None and item.case is not None and not reason_not_scored(item)
