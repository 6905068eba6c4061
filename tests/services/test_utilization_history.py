"""The parsed utilization history of GPUs and CPUs, and its summary."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.services.observe.utilization_history import (
    UtilizationHistory,
    UtilizationRow,
    parse_utilization,
    summarize_utilization,
)


def utilization_row(what: str, *values: float | None, **more: Any) -> dict[str, Any]:
    return {"node": "n1", "what": what, "values": list(values), **more}


@pytest.mark.parametrize(
    ("rows", "figures"),
    [
        ([], []),
        ([utilization_row("gpu0", None, None)], []),
        ([utilization_row("cpu", 10.0, 30.0)], [("mean CPU use", "20 %"), ("CPU time idle", "0%")]),
        (
            [
                utilization_row("cpu", 10.0),
                utilization_row("gpu0", 100.0, 0.0, memory=0.5, power_w=300.0),
                utilization_row("gpu1", 100.0, 100.0, memory=0.75, power_w=500.0),
            ],
            [
                ("mean GPU use", "75 %"),
                ("GPU time idle", "25%"),
                ("fullest GPU memory", "75%"),
                ("mean power of a GPU", "400 W"),
            ],
        ),
    ],
)
def test_utilization_is_summarised_for_gpus_and_cpus(
    rows: list[dict[str, Any]], figures: list[tuple[str, str]]
) -> None:
    assert summarize_utilization(parse_utilization({"rows": rows})) == figures


def test_cpus_are_shown_only_without_gpus() -> None:
    both = parse_utilization({"rows": [utilization_row("cpu", 1.0), utilization_row("gpu0", 2.0, None)]})
    assert [(main_row.label, main_row.values) for main_row in both.main_rows] == [("n1 gpu0", (2.0, None))]
    cpus = parse_utilization({"rows": [utilization_row("cpu", 1.0)]})
    assert ([main_row.label for main_row in cpus.main_rows], cpus.unit) == (["n1 cpu"], "CPU")


def test_utilization_values_of_a_wrong_type_are_ignored() -> None:
    answer = {
        "from": "soon",
        "to": 5,
        "rows": [
            {"node": "n\x1b[2J1", "what": "gpu 0", "values": [1, "x", None, True], "memory": "full"},
            7,
            {},
        ],
    }
    history = parse_utilization(answer)
    assert (history.begin, history.end) == (0.0, 5.0)
    assert history.rows[0] == UtilizationRow("n1 gpu 0", is_gpu=True, values=(1.0, None, None, None))
    assert parse_utilization({"rows": 3}) == UtilizationHistory()
