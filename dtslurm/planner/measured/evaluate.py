"""Comparison of predictions with measured runs, for ``dtslurm plan --evaluate`` and the benchmark."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.intervals import Interval, classify, interval
from dtslurm.planner.measured.cells import RowImpossible, RowUnanswerable, real
from dtslurm.planner.measured.guesses import Row
from dtslurm.planner.measured.rows import MeasuredRow, read_row

GB = 1e9 / 2**30
USABLE = 0.97  # share of a process's GPU memory that the allocator can use


@dataclass(frozen=True)
class RowPrediction:
    """The prediction for one measured row, or the ``reason`` why there is none.

    Attributes:
        tflops: model TFLOP/s per GPU, with FLOPs counted as in the row's table.
        fits: whether the layout is expected to fit in the GPU's memory.
        impossible: whether the layout cannot run, for example with more stages than layers.
        memory_gib: predicted memory of the kind the row gives (allocated, reserved, or nvidia-smi's total).
    """

    row: Row
    case: MeasuredRow | None = None
    estimate: Estimate | None = None
    tflops: float | None = None
    memory_gib: float | None = None
    fits: bool = False
    impossible: bool = False
    reason: str = ""

    @property
    def speed_error(self) -> float | None:
        """Predicted divided by measured tokens/s (TFLOP/s if the row has no tokens/s), minus 1."""
        if self.estimate is None or self.row.get("status", "ok") not in {"ok", ""}:
            return None
        measured = real(self.row, "tokens_per_s_per_gpu")
        if measured is not None:
            return self.estimate.tokens_per_s_per_gpu / measured - 1
        measured = real(self.row, "tflops_per_gpu")
        return self.tflops / measured - 1 if measured is not None and self.tflops is not None else None

    @property
    def interval(self) -> Interval | None:
        """The 80 % interval of the predicted time and speed; None without a prediction."""
        if self.case is None:
            return None
        case = self.case
        kind = classify(
            case.machine.gpu, case.precision, mixture=case.model.is_moe, assumed=case.assumes_layout
        )
        return interval(kind)

    @property
    def memory_error(self) -> float | None:
        """Predicted divided by measured memory, minus 1."""
        measured = measured_memory(self.row)
        if measured is None or self.memory_gib is None or self.row.get("status", "ok") not in {"ok", ""}:
            return None
        return self.memory_gib / measured - 1


def measured_memory(row: Row) -> float | None:
    """Return the measured memory of a row in GiB; GB in a table means 1e9 bytes."""
    value = real(row, "mem_gib")
    kind = (row.get("mem_kind") or "").lower()
    return value * GB if value is not None and "gb as printed" in kind and "derived" not in kind else value


def predict_row(row: Row, constants: Constants) -> RowPrediction:
    """Return the prediction for one row."""
    try:
        case = read_row(row, constants)
    except RowUnanswerable as error:
        return RowPrediction(row, reason=str(error))
    except RowImpossible as error:
        return RowPrediction(row, impossible=True, reason=str(error))
    estimate = case.estimate(constants)
    kind = (row.get("mem_kind") or "").lower()
    predicted = estimate.memory
    # frameworks print the memory of rank 0, on the first stage
    if case.layout.pp > 1 and "nvidia-smi" not in kind:
        predicted = case.estimator(constants).memory(case.layout, first_stage=True)
    memory = predicted.allocated
    if "nvidia-smi" in kind:
        memory = predicted.total
    elif "reserved" in kind:
        memory = predicted.reserved
    tflops = estimate.tokens_per_s_per_gpu * flops_per_token(row, case) / 1e12
    return RowPrediction(row, case, estimate, tflops, memory, fits_at_all(case, estimate, constants))


def flops_per_token(row: Row, measured: MeasuredRow) -> float:
    """Return the FLOPs per token by the counting convention of the row's table.

    Conventions differ by up to a third: full or causal attention, recomputation counted or not, and 6 N of
    all parameters or only of those in matrix products.
    """
    convention = (row.get("flops_convention") or "").lower()
    model, seq = measured.model, measured.seq_len
    if "causal" in convention:
        return model.flops_per_token(seq, causal=True, frozen=measured.frozen)
    full_flops = model.flops_per_token(seq, frozen=measured.frozen)
    if "6*n_all" in convention or "6*n+12" in convention or "6n" in convention:
        count = model.active_params
        if "6*n+12" in convention and measured.layout.pp > 1 and model.tied:
            count += model.embedding_params
        return 6 * count + 3 * model.attention_flops(seq, causal=False)
    counts_recompute = any(word in convention for word in ("recompute counted", "incl", "hw", "8*n", "sc21"))
    if counts_recompute and "no recompute" not in convention and "without recompute" not in convention:
        head_flops = 6 * model.vocab * model.hidden if model.head else 0
        return (
            (full_flops - head_flops) * 4 / 3 + head_flops
            if measured.layout.recompute == "full"
            else full_flops
        )
    return full_flops


def measured_tokens_per_s(prediction: RowPrediction) -> float | None:
    """Return the measured tokens/s per GPU, converted from TFLOP/s by the table's convention if needed."""
    if prediction.case is None or prediction.row.get("status", "ok") not in {"ok", ""}:
        return None
    tokens = real(prediction.row, "tokens_per_s_per_gpu")
    tflops = real(prediction.row, "tflops_per_gpu")
    if tokens is not None or tflops is None:
        return tokens
    return tflops * 1e12 / flops_per_token(prediction.row, prediction.case)


def evaluate(rows: Iterable[Row], constants: Constants) -> list[RowPrediction]:
    """Return the prediction for every row."""
    return [predict_row(row, constants) for row in rows]


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of a group of rows."""

    rows: int
    bias: float
    mean: float
    median: float
    p90: float
    worst: str


def errors(answers: Iterable[RowPrediction], error: Callable[[RowPrediction], float | None]) -> Errors | None:
    """Return statistics of the rows' errors, None if no row has an error."""
    pairs = [(value, prediction) for prediction in answers if (value := error(prediction)) is not None]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: abs(pair[0]))
    sizes = [abs(value) for value, _ in pairs]
    return Errors(
        len(pairs),
        statistics.median(value for value, _ in pairs),
        statistics.mean(sizes),
        statistics.median(sizes),
        sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        pairs[-1][1].row.get("row_id") or "",
    )


def by_source(answers: Iterable[RowPrediction]) -> Mapping[str, list[RowPrediction]]:
    """Return the answers grouped by source."""
    groups: dict[str, list[RowPrediction]] = defaultdict(list)
    for prediction in answers:
        groups[prediction.row.get("source") or "-"].append(prediction)
    return groups


def crashes(answers: Iterable[RowPrediction]) -> tuple[int, int, int, int]:
    """Return (crashed rows rejected, crashed rows, successful rows kept, successful rows), by memory."""
    rejected = crashed = kept = succeeded = 0
    for prediction in answers:
        if prediction.estimate is None and not prediction.impossible:
            continue
        fits = prediction.fits
        if prediction.row.get("status", "ok") in {"ok", ""}:
            succeeded += 1
            kept += fits
        else:
            crashed += 1
            rejected += not fits
    return rejected, crashed, kept, succeeded


def fits_at_all(measured: MeasuredRow, estimate: Estimate, constants: Constants) -> bool:
    """Return whether a row's layout is expected to fit in the GPU's memory.

    If the row does not state recomputation, a fit with full recomputation also counts.
    """
    limit = USABLE * measured.machine.gpu.memory_gib
    if estimate.memory.total <= limit:
        return True
    if not any(text.startswith("recompute not stated") for text in measured.assumed):
        return False
    recomputed = replace(measured, layout=replace(measured.layout, recompute="full"))
    return recomputed.estimate(constants).memory.total <= limit
