"""Measured rows beside the planner's predictions, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtslurm.cli.printing import output
from dtslurm.planner.intervals import Interval
from dtslurm.planner.measured.cells import real
from dtslurm.planner.measured.evaluate import (
    Errors,
    RowPrediction,
    by_source,
    crashes,
    errors,
    measured_memory,
)


def show(predictions: Sequence[RowPrediction]) -> None:
    """Print every row, then the errors by source."""
    output.table(
        ("ROW", "MODEL", "GPUS", "LAYOUT", "TOKENS/S/GPU", "MEASURED", "ERROR", "GIB", "MEASURED", "ERROR"),
        [_format_prediction(prediction) for prediction in predictions],
    )
    output.say()
    groups = by_source(predictions)
    rows = []
    for name, source_rows in [*groups.items(), ("all", list(predictions))]:
        speed = errors(source_rows, lambda item: item.speed_error)
        memory = errors(source_rows, lambda item: item.memory_error)
        rejected, crashed, accepted, succeeded = crashes(source_rows)
        rows.append(
            [
                name,
                str(len(source_rows)),
                str(sum(bool(prediction.reason) for prediction in source_rows)),
                *_format_errors(speed),
                *_format_errors(memory)[:3],
                f"{rejected}/{crashed}" if crashed else "-",
                f"{accepted}/{succeeded}" if crashed else "-",
            ]
        )
    output.table(
        (
            "SOURCE",
            "ROWS",
            "UNANSWERED",
            "SPEED: MEDIAN",
            "MEAN",
            "P90",
            "BIAS",
            "MEMORY: MEDIAN",
            "MEAN",
            "P90",
            "CRASHES REJECTED",
            "SUCCESSES KEPT",
        ),
        rows,
    )


def _format_errors(summary: Errors | None) -> list[str]:
    """Return median, mean, 90th percentile and bias of the errors, in percent."""
    if summary is None:
        return ["-", "-", "-", "-"]
    return [f"{summary.median:.1%}", f"{summary.mean:.1%}", f"{summary.p90:.1%}", f"{summary.bias:+.1%}"]


def _format_speed(speed: float, interval: Interval | None) -> str:
    """Return a speed with its 80 % interval: ``11,707 (9,565-14,329)``."""
    if interval is None:
        return f"{speed:,.0f}"
    low, high = interval.bounds(speed)
    return f"{speed:,.0f} ({low:,.0f}-{high:,.0f})"


def _format_prediction(prediction: RowPrediction) -> list[str]:
    """Return the cells of one row: predicted and measured speed, then memory, each with its error."""
    row = prediction.row
    label_cells = [row.get("row_id") or "-", row.get("model") or "-", row.get("gpus") or "-"]
    if prediction.estimate is None or prediction.case is None:
        return [*label_cells, prediction.reason, "", "", "", "", "", ""]
    speed, memory = prediction.speed_error, prediction.memory_error
    measured = measured_memory(row)
    return [
        *label_cells,
        str(prediction.case.layout),
        _format_speed(prediction.estimate.tokens_per_s_per_gpu, prediction.interval),
        row.get("tokens_per_s_per_gpu") or "-",
        f"{speed:+.1%}" if speed is not None else "-",
        f"{prediction.memory_gib:.1f}",
        f"{measured:.1f}" if measured is not None else "-",
        f"{memory:+.1%}" if memory is not None else "-",
    ]


def values(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return the JSON document that docs/plan.md describes, without its ``schema``."""
    return {"rows": [_prediction_document(item) for item in predictions]}


def _prediction_document(prediction: RowPrediction) -> dict[str, Any]:
    row = prediction.row
    document: dict[str, Any] = {"source": row.get("source") or "", "row_id": row.get("row_id") or ""}
    if prediction.estimate is None or prediction.case is None:
        document["reason"] = prediction.reason
        if prediction.impossible:
            keys = ("tokens_per_s_per_gpu", "tflops_per_gpu", "memory_gib")
            document["predicted"] = {**dict.fromkeys(keys), "fits": False}
    else:
        speed = prediction.estimate.tokens_per_s_per_gpu
        low, high = prediction.interval.bounds(speed) if prediction.interval else (speed, speed)
        document["predicted"] = {
            "tokens_per_s_per_gpu": speed,
            "low": low,
            "high": high,
            "tflops_per_gpu": prediction.tflops,
            "memory_gib": prediction.memory_gib,
            "fits": prediction.fits,
        }
        document["layout"] = str(prediction.case.layout)
        document["framework"] = prediction.case.framework
        document["assumed"] = list(prediction.case.assumed)
    document["measured"] = {
        "tokens_per_s_per_gpu": real(row, "tokens_per_s_per_gpu"),
        "tflops_per_gpu": real(row, "tflops_per_gpu"),
        "memory_gib": real(row, "mem_gib"),
        "status": row.get("status") or "ok",
    }
    return document
