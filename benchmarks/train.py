"""What a session costs a training loop, and how long a checkpoint holds it up, beside torch.save.

``python -m benchmarks.train [--json]`` prints tables. Loops with and without a session take turns in the same
processes, two ranks with DistributedDataParallel on gloo and one alone; a ratio of 1 means no cost.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.logs import table

STEPS, ROUNDS = 50, 9
WIDTHS = (128, 384)  # about 1 and 5 ms a step on one core
SAVED_MIB = 256


def loop(net: Any, inputs: Any, optimizer: Any, end: Callable[[Any], object]) -> float:
    """Return the seconds of one step."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = net(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end(loss)
    return (time.perf_counter() - begin) / STEPS


def steps(run: Any, width: int) -> dict[str, Any]:
    """Return the median ratio of a step with `end_step` to one without, pair by pair."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers = [nn.Linear(width, width), nn.ReLU()] * 4
    net = run.watch(DistributedDataParallel(nn.Sequential(*layers)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs = torch.randn(64, width)
    loop(net, inputs, optimizer, lambda loss: None)  # warm
    bare: list[float] = []
    ours: list[float] = []
    for number in range(ROUNDS):
        both = [(bare, lambda loss: None), (ours, lambda loss: run.end_step(loss=loss))]
        for times, end in both if number % 2 else reversed(both):
            times.append(loop(net, inputs, optimizer, end))
    ratio = statistics.median(with_it / without for with_it, without in zip(ours, bare, strict=True))
    return {
        "ranks": run.world_size,
        "bare step ms": round(1000 * statistics.median(bare), 3),
        "with session ms": round(1000 * statistics.median(ours), 3),
        "ratio": round(ratio, 3),
    }


def call_cost(run: Any) -> float:
    """Return the microseconds of one `end_step` beside nothing."""
    count = 20_000
    begin = time.perf_counter()
    for _ in range(count):
        run.end_step(loss=1.0)
    return (time.perf_counter() - begin) / count * 1e6


def saves(run: Any, folder: Path) -> list[dict[str, Any]]:
    """Return how long training waits for a checkpoint."""
    import torch

    tensors = {f"layer{i}": torch.randn(SAVED_MIB << 14) for i in range(16)}  # of 4-byte numbers
    rows = []

    def note(what: str, save: Callable[[int], object], after: Callable[[], object]) -> None:
        waited, whole = [], []
        for number in range(4):
            begin = time.perf_counter()
            save(number)
            waited.append(time.perf_counter() - begin)
            after()
            whole.append(time.perf_counter() - begin)
        rows.append(
            {
                "what": what,
                "MiB": SAVED_MIB,
                "training waits ms": round(1000 * statistics.median(waited[1:])),
                "on disk after ms": round(1000 * statistics.median(whole[1:])),
            }
        )

    def plain(number: int) -> None:
        torch.save(tensors, folder / "plain.pt")

    def synced(number: int) -> None:
        with (folder / "synced.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    keeper = run.checkpoints
    note("torch.save", plain, lambda: None)
    note("torch.save and fsync", synced, lambda: None)
    note("checkpoint()", lambda number: keeper.save(number + 1, tensors), keeper.wait)
    note("checkpoint(wait=True)", lambda number: keeper.save(number + 9, tensors, wait=True), lambda: None)
    return rows


def rank(folder: Path) -> None:
    """Measure as one of the ranks; rank 0 prints."""
    import torch

    from dtslurm import train

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with train.session(save_minutes=None, folder=folder / "checkpoints", keep=1) as run:
        results["steps"] = [steps(run, width) for width in WIDTHS]
        results["end_step us"] = round(call_cost(run), 2)
        if run.world_size == 1:
            results["saves"] = saves(run, folder)
        if run.rank == 0:
            sys.stdout.write(json.dumps(results) + "\n")


def ranks(world: int) -> dict[str, Any]:
    """Return what so many ranks measure."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        probe.close()
        env = {
            **os.environ,
            **meet,
            "WORLD_SIZE": str(world),
            "DTSLURM_RUN_DIR": name,
            "OMP_NUM_THREADS": "1",
        }
        env |= {"DTSLURM_METRICS": f"{name}/train.jsonl"}
        argv = [sys.executable, "-m", "benchmarks.train", "--rank", name]
        started = [
            subprocess.Popen(
                argv,
                env={**env, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=subprocess.PIPE if number == 0 else None,
                text=True,
            )
            for number in range(world)
        ]
        out = started[0].communicate()[0]
        if any(one.wait() for one in started):
            sys.exit("a rank failed")
        results: dict[str, Any] = json.loads(out.splitlines()[-1])
        return results


def main() -> None:
    """Print the tables, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        rank(chosen.rank)
        return
    results = [ranks(1), ranks(2)]
    if chosen.json:
        sys.stdout.write(json.dumps({"schema": 1, "train": results}, indent=1) + "\n")
        return
    table([row for one in results for row in one["steps"]])
    table([{"ranks": number, "end_step us": one["end_step us"]} for number, one in enumerate(results, 1)])
    table(results[0]["saves"])


if __name__ == "__main__":
    main()
