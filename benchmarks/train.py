"""The overhead of `dtslurm.train.session` in a training loop, and the time of checkpoints, beside torch.save.

- Steps: loops with and without a session run alternately in the same processes, on the CPU, with one rank and
  with two ranks that use DistributedDataParallel with gloo. A ratio of 1 means no overhead.
- `end_step`: the time of one call.
- Checkpoints of 256 MiB: the time for which training waits, and the time until the checkpoint is complete on
  disk.

Run it with ``python -m benchmarks.train [--json]``.
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

from benchmarks.logs import print_table

STEPS, ROUNDS = 50, 9
WIDTHS = (128, 384)  # about 1 and 5 ms a step on one core
CHECKPOINT_MIB = 256


def time_loop(net: Any, inputs: Any, optimizer: Any, end: Callable[[Any], object]) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = net(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end(loss)
    return (time.perf_counter() - start) / STEPS


def compare_steps(run: Any, width: int) -> dict[str, Any]:
    """Return the times of a step with and without `end_step`, and the median of the ratios of all pairs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers = [nn.Linear(width, width), nn.ReLU()] * 4
    net = run.watch(DistributedDataParallel(nn.Sequential(*layers)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs = torch.randn(64, width)
    time_loop(net, inputs, optimizer, lambda loss: None)  # warms up
    bare: list[float] = []
    with_session: list[float] = []
    for number in range(ROUNDS):
        both = [(bare, lambda loss: None), (with_session, lambda loss: run.end_step(loss=loss))]
        for times, end in both if number % 2 else reversed(both):
            times.append(time_loop(net, inputs, optimizer, end))
    ratio = statistics.median(session / plain for session, plain in zip(with_session, bare, strict=True))
    return {
        "ranks": run.world_size,
        "bare step ms": round(1000 * statistics.median(bare), 3),
        "with session ms": round(1000 * statistics.median(with_session), 3),
        "ratio": round(ratio, 3),
    }


def time_end_step(run: Any) -> float:
    """Return the microseconds of one call of `end_step`."""
    count = 20_000
    start = time.perf_counter()
    for _ in range(count):
        run.end_step(loss=1.0)
    return (time.perf_counter() - start) / count * 1e6


def time_checkpoints(run: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the milliseconds for which training waits, and until the checkpoint is on disk."""
    import torch

    tensors = {f"layer{i}": torch.randn(CHECKPOINT_MIB << 14) for i in range(16)}  # float32
    rows = []

    def measure(method: str, save: Callable[[int], object], wait: Callable[[], object]) -> None:
        blocked_s, total_s = [], []
        for number in range(4):
            start = time.perf_counter()
            save(number)
            blocked_s.append(time.perf_counter() - start)
            wait()
            total_s.append(time.perf_counter() - start)
        rows.append(
            {
                "method": method,
                "MiB": CHECKPOINT_MIB,
                "training waits ms": round(1000 * statistics.median(blocked_s[1:])),
                "on disk after ms": round(1000 * statistics.median(total_s[1:])),
            }
        )

    def save_plain(number: int) -> None:
        torch.save(tensors, folder / "plain.pt")

    def save_synced(number: int) -> None:
        with (folder / "synced.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    checkpoints = run.checkpoints
    measure("torch.save", save_plain, lambda: None)
    measure("torch.save and fsync", save_synced, lambda: None)
    measure("checkpoint()", lambda number: checkpoints.save(number + 1, tensors), checkpoints.wait)
    measure(
        "checkpoint(wait=True)", lambda number: checkpoints.save(number + 9, tensors, wait=True), lambda: None
    )
    return rows


def run_rank(folder: Path) -> None:
    """Measure in one rank; rank 0 prints the results."""
    import torch

    from dtslurm import train

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with train.session(save_minutes=None, folder=folder / "checkpoints", keep=1) as run:
        results["steps"] = [compare_steps(run, width) for width in WIDTHS]
        results["end_step us"] = round(time_end_step(run), 2)
        if run.world_size == 1:
            results["checkpoints"] = time_checkpoints(run, folder)
        if run.rank == 0:
            sys.stdout.write(json.dumps(results) + "\n")


def run_ranks(world_size: int) -> dict[str, Any]:
    """Start this many ranks and return the results of rank 0."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        probe.close()
        env = {
            **os.environ,
            **rendezvous,
            "WORLD_SIZE": str(world_size),
            "DTSLURM_RUN_DIR": name,
            "OMP_NUM_THREADS": "1",
        }
        env |= {"DTSLURM_METRICS": f"{name}/train.jsonl"}
        argv = [sys.executable, "-m", "benchmarks.train", "--rank", name]
        processes = [
            subprocess.Popen(
                argv,
                env={**env, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=subprocess.PIPE if number == 0 else None,
                text=True,
            )
            for number in range(world_size)
        ]
        out = processes[0].communicate()[0]
        if any(process.wait() for process in processes):
            sys.exit("a rank failed")
        results: dict[str, Any] = json.loads(out.splitlines()[-1])
        return results


def main() -> None:
    """Print the tables, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank)
        return
    results = [run_ranks(1), run_ranks(2)]
    if arguments.json:
        sys.stdout.write(json.dumps({"schema": 1, "train": results}, indent=1) + "\n")
        return
    print_table([row for result in results for row in result["steps"]])
    print_table(
        [{"ranks": ranks, "end_step us": result["end_step us"]} for ranks, result in enumerate(results, 1)]
    )
    print_table(results[0]["checkpoints"])


if __name__ == "__main__":
    main()
