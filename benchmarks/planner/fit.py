"""Fit the planner's constants: ``python -m benchmarks.planner.fit [--write] [NAME...]``.

Every constant whose source says so (or those named) is fitted at once, by least squares on the logarithm of
tokens/s over the rows ``split.json`` names. Each is held near its present value: what is nearly known from
data sheets tightly, what nobody publishes loosely. A table weighs by its number of rows to the power of 0.4,
at most 60 of them. Needs scipy, which the group ``examples`` brings.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.planner.score import fitted_on, rows, timed
from dtslurm.planner import constants
from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import DATA
from dtslurm.planner.measured.evaluate import RowPrediction, by_source, evaluate
from dtslurm.planner.measured.rows import real

FITTED = "fitted on the rows that benchmarks/planner/split.json names"
MOST_ROWS, NOISE, STEP = 60, 0.05, 0.02
SHARES = (
    "tp_overlap",
    "dp_overlap",
    "ep_overlap",
    "pp_exposed",
    "all_to_all_efficiency",
    "matmul",
    "nic_efficiency",
)  # never above 1
FREEDOM = {  # how far from its present value a constant may be: standard deviation of its logarithm
    "hbm_efficiency": 0.005,
    "nic_efficiency": 0.02,
    "matmul": 0.05,
    "elementwise": 0.3,
    "all_to_all_efficiency": 0.1,
    "expert_ramp_ffn": 0.1,
    "gemm_tail_waves": 0.8,
    "gemm_ramp_k": 0.8,
    "overlap_slowdown": 0.4,
    "dp_overlap": 0.15,
    "hop_latency_us": 0.6,
    "host_moe_us": 0.6,
    "host_slowness_grace": 0.2,
    "expert_gap_us": 0.6,
}
OTHERWISE = 0.25


def chosen(answers: list[RowPrediction]) -> tuple[list[RowPrediction], list[float]]:
    """Return the rows to fit on and their weights; the same ones every time."""
    random.seed(3)
    kept: list[RowPrediction] = []
    weights: list[float] = []
    for items in by_source(answers).values():
        some = random.sample(items, min(len(items), MOST_ROWS))
        kept += some
        weights += [len(some) ** -0.3] * len(some)
    mean = sum(weights) / len(weights)
    return kept, [weight / mean for weight in weights]


def names() -> list[str]:
    """Return the constants that are fitted: all that may be, or those of them that the command line names."""
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
    fitted = [name for name, entry in constants.entries().items() if entry["source"] == FITTED]
    return [name for name in fitted if not wanted or name in wanted]


def residuals(
    answers: list[RowPrediction], weights: list[float], fitted: list[str]
) -> tuple[list[float], Callable[[Any], list[float]]]:
    """Return the logarithms to start from, and what is minimised: errors of rows, then departures."""
    present = constants.default()
    start = [math.log(present[name]) for name in fitted]
    measured = [math.log(real(item.row, "tokens_per_s_per_gpu") or 1.0) for item in answers]
    freedom = [FREEDOM.get(name.split("/")[0], OTHERWISE) for name in fitted]

    def errors(point: Any) -> list[float]:
        tried: Constants = present.but(
            {name: math.exp(float(value)) for name, value in zip(fitted, point, strict=True)}
        )
        rows_off = [
            weight * (math.log(item.case.estimate(tried).tokens_per_s_per_gpu) - truth) / NOISE
            for item, truth, weight in zip(answers, measured, weights, strict=True)
            if item.case
        ]
        moved = [(float(x) - x0) / room for x, x0, room in zip(point, start, freedom, strict=True)]
        return rows_off + moved

    return start, errors


def main() -> None:
    """Fit, print old and new values, and write them with ``--write``."""
    from scipy.optimize import least_squares

    scored = [
        item
        for item in evaluate([row for row in rows() if fitted_on(row)], constants.default())
        if timed(item) and real(item.row, "tokens_per_s_per_gpu")
    ]
    answers, weights = chosen(scored)
    fitted = names()
    start, errors = residuals(answers, weights, fitted)
    most = [
        max(x + 1e-3, math.log(0.98)) if name.split("/")[0] in SHARES else x + 2
        for name, x in zip(fitted, start, strict=True)
    ]
    least = [x - 2 for x in start]
    found = least_squares(errors, start, bounds=(least, most), loss="soft_l1", diff_step=STEP, max_nfev=10)
    document = {name: dict(entry) for name, entry in constants.entries().items()}
    for name, before, after in zip(fitted, start, found.x, strict=True):
        value = float(f"{math.exp(after):.3g}")
        print(f"{name:<44}{math.exp(before):>10.4g} -> {value:.4g}")
        document[name]["value"] = value
    print(f"{len(answers)} rows, cost {found.cost:.1f}")
    if "--write" in sys.argv:
        (DATA / "constants.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
