"""Predictions beside measured runs: what ``dtslurm plan --evaluate`` prints and the benchmark scores."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.measured.guesses import Row
from dtslurm.planner.measured.rows import MeasuredRow, RowImpossible, RowUnanswerable, read_row, real
from dtslurm.planner.memory import memory_use
from dtslurm.planner.search import rank

GB = 1e9 / 2**30
USABLE = 0.97  # of the memory a process may use, the allocator never gets quite all


@dataclass(frozen=True)
class RowPrediction:
    """One row's prediction beside what was measured; ``reason`` where there is none.

    Attributes:
        tflops: model FLOPs as the row's table counts them.
        fits: all the layout holds is within the GPU's memory.
        impossible: the layout cannot run at all, such as more stages than layers.
        memory_gib: of the kind the row gives (allocated, reserved, or all that nvidia-smi shows).
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
        """Predicted over measured tokens/s (or TFLOP/s where only those are given), less 1."""
        if self.estimate is None or self.row.get("status", "ok") not in {"ok", ""}:
            return None
        measured = real(self.row, "tokens_per_s_per_gpu")
        if measured is not None:
            return self.estimate.tokens_per_s_per_gpu / measured - 1
        measured = real(self.row, "tflops_per_gpu")
        return self.tflops / measured - 1 if measured is not None and self.tflops is not None else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, less 1."""
        measured = measured_memory(self.row)
        if measured is None or self.memory_gib is None or self.row.get("status", "ok") not in {"ok", ""}:
            return None
        return self.memory_gib / measured - 1


def measured_memory(row: Row) -> float | None:
    """Return the measured memory of a row in GiB; tables that print GB meant 1e9 bytes."""
    value = real(row, "mem_gib")
    kind = (row.get("mem_kind") or "").lower()
    return value * GB if value is not None and "gb as printed" in kind and "derived" not in kind else value


def answer(row: Row, constants: Constants) -> RowPrediction:
    """Return the prediction for one row."""
    try:
        case = read_row(row)
    except RowUnanswerable as error:
        return RowPrediction(row, reason=str(error))
    except RowImpossible as error:
        return RowPrediction(row, impossible=True, reason=str(error))
    estimate = case.estimate(constants)
    kind = (row.get("mem_kind") or "").lower()
    seen = estimate.memory
    if case.layout.pp > 1 and "nvidia-smi" not in kind:  # frameworks print what rank 0 sees
        settings = (case.model, case.layout, case.seq_len, case.framework, case.precision)
        seen = memory_use(*settings, constants, first_stage=True, frozen=case.frozen)
    memory = seen.allocated
    if "nvidia-smi" in kind:
        memory = seen.total
    elif "reserved" in kind:
        memory = seen.reserved
    tflops = estimate.tokens_per_s_per_gpu * flops_per_token(row, case) / 1e12
    return RowPrediction(row, case, estimate, tflops, memory, fits_at_all(case, estimate, constants))


def flops_per_token(row: Row, case: MeasuredRow) -> float:
    """Return FLOPs of a token as the row's table counts them.

    Tables differ by up to a third: attention full or causal, recomputation counted or not, 6 N of all
    parameters or of those in matrix products.
    """
    convention = (row.get("flops_convention") or "").lower()
    model, seq = case.model, case.seq_len
    if "causal" in convention:
        return model.flops_per_token(seq, causal=True, frozen=case.frozen)
    full = model.flops_per_token(seq, frozen=case.frozen)
    if "6*n_all" in convention or "6*n+12" in convention or "6n" in convention:
        count = model.active_params
        if "6*n+12" in convention and case.layout.pp > 1 and model.tied:
            count += model.embedding_params
        return 6 * count + 3 * model.attention_flops(seq, causal=False)
    recomputed = any(word in convention for word in ("recompute counted", "incl", "hw", "8*n", "sc21"))
    if recomputed and "no recompute" not in convention and "without recompute" not in convention:
        head = 6 * model.vocab * model.hidden if model.head else 0
        return (full - head) * 4 / 3 + head if case.layout.recompute == "full" else full
    return full


def evaluate(rows: Iterable[Row], constants: Constants) -> list[RowPrediction]:
    """Return the prediction for every row."""
    return [answer(row, constants) for row in rows]


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
    """Return the errors of the rows that have one, None where none has."""
    pairs = [(value, item) for item in answers if (value := error(item)) is not None]
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
    for item in answers:
        groups[item.row.get("source") or "-"].append(item)
    return groups


def crashes(answers: Iterable[RowPrediction]) -> tuple[int, int, int, int]:
    """Return (crashed rows rejected, crashed rows, successful rows kept, successful rows), memory alone."""
    rejected = crashed = kept = succeeded = 0
    for item in answers:
        if item.estimate is None and not item.impossible:
            continue
        fits = item.fits
        if item.row.get("status", "ok") in {"ok", ""}:
            succeeded += 1
            kept += fits
        else:
            crashed += 1
            rejected += not fits
    return rejected, crashed, kept, succeeded


def fits_at_all(case: MeasuredRow, estimate: Estimate, constants: Constants) -> bool:
    """Tell whether a row's layout is expected to run: all it holds is within the GPU's memory.

    Where the table leaves out recomputation, everything may have been recomputed.
    """
    room = USABLE * case.machine.gpu.memory_gib
    if estimate.memory.total <= room:
        return True
    if not any(text.startswith("recompute not stated") for text in case.assumed):
        return False
    made = replace(case, layout=replace(case.layout, recompute="full"))
    return made.estimate(constants).memory.total <= room


@dataclass(frozen=True)
class ChoiceLoss:
    """Measured layouts of one model, GPU count and batch, and what choosing by prediction loses."""

    group: str
    layouts: int
    loss: float
    chosen: str
    best: str


def choices(answers: Iterable[RowPrediction], least: int = 3) -> list[ChoiceLoss]:
    """Return the loss of the layout picked against the best measured one, per group of at least three."""
    groups: dict[tuple[str, ...], list[RowPrediction]] = defaultdict(list)
    keys = ("source", "model", "layers", "seq_len", "gpu", "gpus", "global_batch", "precision")
    for item in answers:
        if item.estimate is not None and item.speed_error is not None and item.row.get("global_batch"):
            groups[tuple(item.row.get(key) or "" for key in keys)].append(item)
    found = []
    for key, items in groups.items():
        best_of: dict[str, RowPrediction] = {}
        for item in items:  # repeated runs of one layout count once, by their best
            name = str(item.case.layout) if item.case else ""
            if name not in best_of or _speed(item) > _speed(best_of[name]):
                best_of[name] = item
        if len(best_of) < least:
            continue
        entries = list(best_of.values())
        made = {id(item.estimate): item for item in entries if item.estimate}
        roomy = [item.estimate for item in entries if item.estimate and item.estimate.fits]
        ranked = rank(roomy or [item.estimate for item in entries if item.estimate])  # as a plan would
        chosen = made[id(ranked[0])]
        best = max(entries, key=_speed)
        loss = 1 - _speed(chosen) / _speed(best)
        ids = (chosen.row.get("row_id") or "", best.row.get("row_id") or "")
        found.append(ChoiceLoss(" ".join(filter(None, key)), len(entries), loss, *ids))
    return found


def _speed(item: RowPrediction) -> float:
    speed = real(item.row, "tokens_per_s_per_gpu")
    return speed if speed is not None else real(item.row, "tflops_per_gpu") or 0.0
