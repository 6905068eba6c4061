"""The ranking of layouts, compared with the measured speeds of the same layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from dtslurm.planner.measured.cells import real
from dtslurm.planner.measured.evaluate import RowPrediction
from dtslurm.planner.search import rank

_KEYS = ("source", "model", "layers", "seq_len", "gpu", "gpus", "global_batch", "precision")


@dataclass(frozen=True)
class ChoiceLoss:
    """The comparison of predicted and measured order among the layouts of one model, framework and machine.

    Attributes:
        loss: share of the speed that is lost by the layout predicted best.
        tau: Kendall's rank correlation of predicted and measured speeds, 1 for the same order.
        source: table of the rows.
    """

    group: str
    layouts: int
    loss: float
    tau: float
    chosen: str
    best: str
    source: str


def choice_groups(
    answers: Iterable[RowPrediction], min_size: int = 3
) -> dict[tuple[str, ...], list[RowPrediction]]:
    """Return the measured layouts of each model, framework and machine, for groups of ``min_size`` or more.

    Repeated runs of a layout count once, with the best speed.
    """
    groups: dict[tuple[str, ...], dict[str, RowPrediction]] = defaultdict(dict)
    for prediction in answers:
        row = prediction.row
        if prediction.case is None or prediction.speed_error is None or not row.get("global_batch"):
            continue
        key = (*(row.get(column) or "" for column in _KEYS), prediction.case.framework)
        layouts = groups[key]
        name = str(prediction.case.layout)
        if name not in layouts or _measured_speed(prediction) > _measured_speed(layouts[name]):
            layouts[name] = prediction
    return {key: list(layouts.values()) for key, layouts in groups.items() if len(layouts) >= min_size}


def measure_choice_losses(answers: Iterable[RowPrediction], min_size: int = 3) -> list[ChoiceLoss]:
    """Return the loss by the predicted best layout and the rank correlation, for each group of layouts."""
    losses = []
    for key, predictions in choice_groups(answers, min_size).items():
        rows_by_estimate = {id(item.estimate): item for item in predictions if item.estimate}
        fitting = [item.estimate for item in predictions if item.estimate and item.estimate.fits]
        # as a plan ranks them
        ranked = rank(fitting or [item.estimate for item in predictions if item.estimate])
        chosen = rows_by_estimate[id(ranked[0])]
        best = max(predictions, key=_measured_speed)
        losses.append(
            ChoiceLoss(
                group=" ".join(filter(None, key)),
                layouts=len(predictions),
                loss=1 - _measured_speed(chosen) / _measured_speed(best),
                tau=kendall_tau(
                    [item.estimate.tokens_per_s_per_gpu for item in predictions if item.estimate],
                    [_measured_speed(item) for item in predictions],
                ),
                chosen=chosen.row.get("row_id") or "",
                best=best.row.get("row_id") or "",
                source=key[0],
            )
        )
    return losses


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Kendall's tau: pairs in the same order minus pairs in reverse, over all pairs."""
    signs = [
        (predicted[i] - predicted[j]) * (measured[i] - measured[j])
        for i, j in combinations(range(len(measured)), 2)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else 0.0


def _measured_speed(item: RowPrediction) -> float:
    speed = real(item.row, "tokens_per_s_per_gpu")
    return speed if speed is not None else real(item.row, "tflops_per_gpu") or 0.0
