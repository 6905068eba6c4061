"""The planner against published runs: throughput, memory, crashes, choice and the time of a search.

Rows that constants were fitted on (``split.json``) and rows that only validate are shown apart. The worst
rows of each part are named with what was predicted for them.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtslurm.planner import constants, hardware
from dtslurm.planner.measured.evaluate import (
    RowPrediction,
    by_source,
    crashes,
    errors,
    evaluate,
    measure_choice_losses,
)
from dtslurm.planner.models import presets
from dtslurm.planner.search import TrainingTask, search

HERE = Path(__file__).parent
TABLES = ("runs.csv", "runs_ultrascale.csv", "runs_vtrain_single.csv")
TORCH_KINDS = ("torch", "allocated", "peak")


def rows() -> list[dict[str, str]]:
    """Return every measured row."""
    found: list[dict[str, str]] = []
    for name in TABLES:
        with (HERE / "data" / name).open(encoding="utf-8", newline="") as stream:
            found += csv.DictReader(stream)
    return found


def fitted_on(row: Mapping[str, str], what: str = "throughput") -> bool:
    """Tell whether constants of ``what`` may have been fitted on a row."""
    rules: dict[str, str] | None = json.loads((HERE / "split.json").read_text())["fit"].get(row["source"])
    if rules is None or rules.get("for", what) != what:
        return False
    return all(re.search(pattern, row[key]) for key, pattern in rules.items() if key not in {"why", "for"})


def timed(item: RowPrediction) -> bool:
    """Tell whether a row's speed is scored.

    Left out: figures from memory, and of Ultra-Scale what ran below 5 % MFU, over more than a node's tensor
    parallelism, or with tensor and pipeline parallelism at once (a fixed 60 to 200 ms per micro-batch there,
    which the page puts down to older code).
    """
    if item.row["quality"] == "memory" or item.speed_error is None or item.case is None:
        return False
    layout = item.case.layout
    if item.row["source"] != "ultrascale":
        return True
    mixed = layout.tp > 1 and layout.pp > 1
    return float(item.row["mfu_pct"] or 0) >= 5 and not mixed and layout.tp <= 8


def throughput(answers: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return the errors of speed, of all rows and by source."""
    scored = [item for item in answers if timed(item)]
    whole = errors(scored, lambda item: item.speed_error)
    by = {
        name: found
        for name, items in by_source(scored).items()
        if (found := errors(items, lambda item: item.speed_error))
    }
    assert whole is not None
    return {
        "rows": whole.rows,
        "median": whole.median,
        "p90": whole.p90,
        "mean_of_source_means": statistics.mean(found.mean for found in by.values()),
        "sources": {name: vars(found) for name, found in by.items()},
    }


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
        "sources": {name: vars(found) for name, found in by.items()},
    }


def choosing(answers: Iterable[RowPrediction]) -> dict[str, Any]:
    """Return what picking the predicted best loses against the measured best, by source."""
    found = measure_choice_losses([item for item in answers if timed(item)])
    by: dict[str, list[float]] = {}
    for choice in found:
        by.setdefault(choice.group.split()[0], []).append(choice.loss)
    return {
        "groups": len(found),
        "mean": statistics.mean(choice.loss for choice in found) if found else None,
        "worst": max((choice.loss for choice in found), default=None),
        "worst_group": max(found, key=lambda choice: choice.loss).group if found else None,
        "sources": {
            name: {"groups": len(losses), "mean": statistics.mean(losses), "worst": max(losses)}
            for name, losses in by.items()
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
    for item in sorted((i for i in answers if timed(i)), key=lambda i: -abs(i.speed_error or 0)):
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
            + (f"; {why}" if (why := explanation(item.row["row_id"])) else "")
        )
        if len(lines) == count:
            break
    return lines


EXPLAINED = {  # rows (or tables) far off, by what is known of them; they are scored all the same
    "ultrascale-1860": "ran at 75.5 of 79 GiB: the allocator frees and asks again (micro-batch 1: 6,919)",
    "ultrascale-1662": "ran at 71.5 of 79 GiB, as ultrascale-1860; so did ultrascale-1737",
    "ultrascale-0511": "with ZeRO-1 and no other change it ran at 20,616: nothing in the layout tells why",
    "torchtitan-04": "a B200 whose power was limited, the table does not say to what",
    "torchtitan-029": "float8 scaled by rows: 27 % below the same row scaled by tensors, below even its bf16",
    "megatron-bridge-022": "the release's own notes call it a regression: 18,304 after 28,947 tokens/s",
    "megatron-bridge-264": "half of the same layout's speed in the release before (10,494)",
    "megatron-bridge-228": "0.56 of the same layout's speed in the patch release after (9,058)",
    "nemo-launcher": "figures of 2022; Korthikanti et al. measured 1.2 times as much with the same degrees",
    "bloom-prequel": "single iterations before the PCIe and NUMA layout of the nodes was put right",
    "oellm": "real routing at the start of training; how uneven it was is not told",
    "vtrain-single": "batches of runs differ: hidden 2048, tp=4 takes 160 ms at micro-batch 1, 151 ms at 2",
    "vtrain-multi-016": "half the speed of micro-batch 32 and of 16: near the end of its memory, perhaps",
}


def explanation(row_id: str) -> str:
    """Return what is known of a row that is far off."""
    return next((why for start, why in EXPLAINED.items() if row_id.startswith(start)), "")


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
        task = TrainingTask(
            presets.preset(model), hardware.machine(gpu, nodes), seq_len, gbs, "megatron", "bf16"
        )
        spans = []
        for _ in range(5):
            begin = time.perf_counter()
            search(task, constants.default())
            spans.append((time.perf_counter() - begin) * 1000)
        times[name] = min(spans)
    words = ["plan", "llama-2-7b", "--gpu", "H100-80GB", "-N", "8", "--gbs", "1024", "--json"]
    for name, argv in {
        "dtslurm plan, 7B on 64 GPUs": [sys.executable, "-m", "dtslurm", *words],
        "python -c pass": [sys.executable, "-c", "pass"],
    }.items():
        spans = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run(argv, capture_output=True, check=True)
            spans.append((time.perf_counter() - begin) * 1000)
        times[name] = min(spans)
    return times


def measure() -> dict[str, Any]:
    """Return every figure."""
    answers = evaluate(rows(), constants.default())
    fitted = [item for item in answers if fitted_on(item.row)]
    held = [item for item in answers if not fitted_on(item.row)]
    held_memory = [item for item in answers if not fitted_on(item.row, "memory")]
    fitted_memory = [item for item in answers if fitted_on(item.row, "memory")]
    return {
        "throughput": {"fitted": throughput(fitted), "held_out": throughput(held)},
        "memory": {"fitted": memory(fitted_memory), "held_out": memory(held_memory)},
        "crashes": {"fitted": crashing(fitted), "held_out": crashing(held)},
        "choice": {"fitted": choosing(fitted), "held_out": choosing(held)},
        "worst": {"fitted": worst(fitted), "held_out": worst(held)},
        "search_ms": searches(),
        "unanswered": sum(bool(item.reason) and not item.impossible for item in answers),
    }


def show(found: Mapping[str, Any]) -> None:
    """Print the figures."""
    for part, title in (("held_out", "rows not fitted on"), ("fitted", "rows fitted on")):
        _part(found, part, title)
    print()
    print(f"rows that could not be answered: {found['unanswered']}")
    for name, value in found["search_ms"].items():
        print(f"{name:<32}{value:>8.0f} ms")


def _part(found: Mapping[str, Any], part: str, title: str) -> None:
    speed, held, choice = (found[name][part] for name in ("throughput", "memory", "choice"))
    print(f"\nthroughput, {title}: {speed['rows']} rows, median {speed['median']:.1%}, ", end="")
    print(f"p90 {speed['p90']:.1%}, mean of the sources' means {speed['mean_of_source_means']:.1%}")
    _sources(speed["sources"])
    if held["rows"]:
        print(f"memory, {title}: {held['rows']} rows, median {held['median']:.1%}, p90 {held['p90']:.1%}")
        _sources(held["sources"])
    gone = found["crashes"][part]
    kept, succeeded = gone["kept"], gone["succeeded"]
    print(f"crashed, {title}: {gone['rejected']} of {gone['of']} rejected ", end="")
    print(
        f"({gone['rejected'] / gone['of']:.1%}); {kept} of {succeeded} that ran kept ({kept / succeeded:.1%})"
    )
    if choice["groups"]:
        print(f"choice, {title}: {choice['groups']} groups, loss {choice['mean']:.1%} on average, ", end="")
        print(f"{choice['worst']:.1%} at worst ({choice['worst_group']})")
        for name, loss in choice["sources"].items():
            print(f"  {name:<28}{loss['groups']:>5} groups", end="")
            print(f"  mean {loss['mean']:.1%}  worst {loss['worst']:.1%}")
    print(f"furthest off, {title}:")
    for line in found["worst"][part]:
        print(f"  {line}")


def _sources(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, item in found.items():
        print(
            f"  {name:<28}{item['rows']:>5} rows  bias {item['bias']:+6.1%}  median {item['median']:6.1%}  "
            f"mean {item['mean']:6.1%}  p90 {item['p90']:6.1%}"
        )


def main() -> None:
    """Print the figures, or JSON with ``--json``."""
    found = measure()
    if "--json" in sys.argv:
        print(json.dumps({"schema": 1, "planner": found}, indent=1))
    else:
        show(found)
