"""The planner against published runs it was not fitted on: speed, intervals, choice, memory, crashes.

Rows are predicted by constants fitted without their laboratory, then without their table, and last by the
planner's own constants, which are fitted on all rows. Rows whose speed is not scored are counted with their
errors. Memory constants are not refitted; ``split.json`` names the rows that they were set by.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.planner.calibration import curve
from benchmarks.planner.fit import LinearModel, observations, priors
from benchmarks.planner.folds import Residual, fold_constants, held_out, linearisation_gap, residuals
from benchmarks.planner.intervals import coverage, table
from benchmarks.planner.tables import HERE, is_scored, laboratory, reason_not_scored, rows
from dtslurm.planner import constants, hardware
from dtslurm.planner.measured.choice import measure_choice_losses
from dtslurm.planner.measured.evaluate import RowPrediction, by_source, crashes, errors, evaluate
from dtslurm.planner.models import presets
from dtslurm.planner.search import TrainingTask, search

TORCH_KINDS = ("torch", "allocated", "active", "peak")
CHECKED_FOLDS = ("databricks-mosaic", "kaist-via")


def set_memory(row: Mapping[str, str]) -> bool:
    """Return whether a row is one that constants of the memory were set by."""
    rules: dict[str, str] | None = json.loads((HERE / "split.json").read_text())["memory"].get(row["source"])
    if rules is None:
        return False
    return all(re.search(pattern, row[key]) for key, pattern in rules.items() if key != "why")


def throughput(answers: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return the errors of speed: of all rows, by table, by laboratory, and without the largest table."""
    scored = [item for item in answers if is_scored(item)]
    by_table = by_source(scored)
    largest = max(by_table, key=lambda name: len(by_table[name]))
    laboratories: dict[str, list[RowPrediction]] = defaultdict(list)
    for item in scored:
        laboratories[laboratory(item.row)].append(item)
    return {
        **_speed_errors(scored),
        "mean_of_source_means": statistics.mean(_speed_errors(items)["mean"] for items in by_table.values()),
        "largest_table": largest,
        "without_largest": _speed_errors([item for item in scored if item.row["source"] != largest]),
        "sources": {name: _speed_errors(items) for name, items in by_table.items()},
        "laboratories": {name: _speed_errors(items) for name, items in laboratories.items()},
    }


def _speed_errors(items: Iterable[RowPrediction]) -> dict[str, Any]:
    result = errors(items, lambda item: item.speed_error)
    assert result is not None
    return vars(result)


def by_class(items: Iterable[Residual]) -> dict[str, Any]:
    """Return the errors of held-out rows by class of prediction."""
    groups: dict[str, list[Residual]] = defaultdict(list)
    for item in items:
        groups[str(item.kind)].append(item)
    return {
        name: {
            **_speed_errors(item.prediction for item in members),
            "mean_of_source_means": statistics.mean(
                _speed_errors(result)["mean"]
                for result in by_source([item.prediction for item in members]).values()
            ),
            "sources": len({item.source for item in members}),
            "laboratories": len({item.laboratory for item in members}),
        }
        for name, members in sorted(groups.items())
    }


def not_scored(answers: Iterable[RowPrediction]) -> dict[str, Any]:
    """Return the errors of the rows whose speed is not scored, by reason."""
    groups: dict[str, list[RowPrediction]] = defaultdict(list)
    for item in answers:
        if reason := reason_not_scored(item):
            groups[reason].append(item)
    return {reason: _speed_errors(items) for reason, items in groups.items()}


def unanswered(answers: Iterable[RowPrediction]) -> dict[str, int]:
    """Return the number of rows that cannot be predicted, by reason."""
    return dict(Counter(item.reason for item in answers if item.reason and not item.impossible))


def memory(answers: Iterable[RowPrediction]) -> dict[str, Any]:
    """Return the errors of memory by source, where torch's own peak is given."""
    torch = [
        item
        for item in answers
        if any(word in (item.row["mem_kind"] or "").lower() for word in TORCH_KINDS)
        and "nvidia-smi" not in item.row["mem_kind"]
    ]
    whole = errors(torch, lambda item: item.memory_error)
    by = {
        name: found
        for name, items in by_source(torch).items()
        if (found := errors(items, lambda item: item.memory_error))
    }
    return {
        "rows": whole.rows if whole else 0,
        "median": whole.median if whole else None,
        "p90": whole.p90 if whole else None,
        "sources": {name: vars(result) for name, result in by.items()},
    }


def choosing(answers: Iterable[RowPrediction]) -> dict[str, Any]:
    """Return what picking the predicted best loses against the measured best, and Kendall's tau."""
    choice_losses = measure_choice_losses([item for item in answers if is_scored(item)])
    by: dict[str, list[Any]] = defaultdict(list)
    for choice in choice_losses:
        by[choice.source].append(choice)
    losses = sorted(choice.loss for choice in choice_losses)
    return {
        "groups": len(choice_losses),
        "mean": statistics.mean(losses),
        "p90": losses[min(len(losses) - 1, int(0.9 * len(losses)))],
        "worst": losses[-1],
        "worst_group": max(choice_losses, key=lambda choice: choice.loss).group,
        "tau": statistics.mean(choice.tau for choice in choice_losses),
        "sources": {
            name: {
                "groups": len(choices),
                "mean": statistics.mean(choice.loss for choice in choices),
                "worst": max(choice.loss for choice in choices),
                "tau": statistics.mean(choice.tau for choice in choices),
            }
            for name, choices in by.items()
        },
    }


def crashing(answers: Iterable[RowPrediction]) -> dict[str, int]:
    """Return how many crashed rows are told not to fit, and how many successful ones to fit."""
    rejected, crashed, kept, succeeded = crashes(answers)
    return {"rejected": rejected, "of": crashed, "kept": kept, "succeeded": succeeded}


def worst(answers: Iterable[RowPrediction], count: int = 12) -> list[str]:
    """Return the rows furthest off, one of each source and model, with the largest terms predicted."""
    seen: set[tuple[str, str]] = set()
    lines: list[str] = []
    for item in sorted((i for i in answers if is_scored(i)), key=lambda i: -abs(i.speed_error or 0)):
        key = (item.row["source"], item.row["model"])
        if key in seen or item.estimate is None or item.case is None:
            continue
        seen.add(key)
        total = item.estimate.time.total
        terms = sorted(item.estimate.time.terms.items(), key=lambda pair: -pair[1])[:3]
        shares = ", ".join(f"{name} {value / total:.0%}" for name, value in terms)
        lines.append(
            f"{item.row['row_id']} {item.row['model']} {item.case.framework} {item.case.layout} "
            f"{item.row['gpu']} x {item.row['gpus']}: {item.speed_error:+.0%}; predicted {shares}"
            + (f"; assumed {'; '.join(item.case.assumed)}" if item.case.assumed else "")
        )
        if len(lines) == count:
            break
    return lines


def one_source_constants(model: LinearModel) -> dict[str, str]:
    """Return the fitted constants that get over 80 % of their information from one table, with the table."""
    result: dict[str, str] = {}
    for index, name in enumerate(model.names):
        information: dict[str, float] = defaultdict(float)
        for item, slope in zip(model.items, model.jacobian[:, index], strict=True):
            information[item.source] += (item.weight * float(slope)) ** 2
        total = sum(information.values())
        source, most = max(information.items(), key=lambda pair: pair[1])
        if total and most / total > 0.8:
            result[name] = source
    return result


def searches() -> dict[str, float]:
    """Return milliseconds of whole searches in this process, and of the command, start-up included."""
    cases = {
        "405B on 16384 GPUs": ("llama-3-405b", 2048, 8192, 2048),
        "7B on 64 GPUs": ("llama-2-7b", 8, 4096, 1024),
    }
    gpu = hardware.find_gpu("H100-80GB")
    assert gpu is not None
    times: dict[str, float] = {}
    for name, (model, nodes, seq_len, gbs) in cases.items():
        machine = hardware.machine(gpu, nodes)
        task = TrainingTask(presets.preset(model), machine, seq_len, gbs, "megatron", "bf16")
        times[name] = _fastest_ms(partial(search, task, constants.default()))
    words = ["plan", "llama-2-7b", "--gpu", "H100-80GB", "-N", "8", "--gbs", "1024", "--json"]
    for name, argv in {
        "dtslurm plan, 7B on 64 GPUs": [sys.executable, "-m", "dtslurm", *words],
        "python -c pass": [sys.executable, "-c", "pass"],
    }.items():
        times[name] = _fastest_ms(partial(subprocess.run, argv, capture_output=True, check=True))
    return times


def _fastest_ms(work: Callable[[], object]) -> float:
    spans = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        spans.append((time.perf_counter() - begin) * 1000)
    return min(spans)


def measure() -> dict[str, Any]:
    """Return every figure."""
    all_rows, values = rows(), constants.default()
    times = searches()
    answers = evaluate(all_rows, values)
    model = LinearModel(observations(answers), values)
    laboratories = fold_constants(model, "laboratory")
    held = {
        "laboratory": held_out(all_rows, laboratories, "laboratory"),
        "source": held_out(all_rows, fold_constants(model, "source"), "source"),
        "in_sample": answers,
    }
    off = residuals(held["laboratory"])
    return {
        "throughput": {name: throughput(items) for name, items in held.items()},
        "classes": by_class(off),
        "interval": {**table(off), "coverage": coverage(off)},
        "own_runs": curve(off),
        "choice": {name: choosing(items) for name, items in held.items()},
        # a laboratory without scored rows has no fold: no constant was fitted on its rows
        "not_scored": not_scored(
            [*held["laboratory"], *(item for item in answers if laboratory(item.row) not in laboratories)]
        ),
        "unanswered": unanswered(answers),
        "memory": {
            "others": memory(item for item in answers if not set_memory(item.row)),
            "set_by": memory(item for item in answers if set_memory(item.row)),
        },
        "crashes": {
            "others": crashing(item for item in answers if not set_memory(item.row)),
            "set_by": crashing(item for item in answers if set_memory(item.row)),
        },
        "linearised": {name: linearisation_gap(model, name, laboratories[name]) for name in CHECKED_FOLDS},
        "one_source": {"of": len(priors()), **one_source_constants(model)},
        "worst": {name: worst(items) for name, items in held.items() if name != "source"},
        "search_ms": times,
    }


def main() -> None:
    """Print the figures, or JSON with ``--json``."""
    from benchmarks.planner.report import show

    result = measure()
    if "--json" in sys.argv:
        print(json.dumps({"schema": 1, "planner": result}, indent=1))
    else:
        show(result)
