"""Sums up what runs' samples tell of their GPUs, on the machine that holds them.

Sent over stdin (`dtslurm.services.wiring.remote_query`). The request is ``{"runs": [DIR]}``.
The answer has, for each of them, ``[samples of one GPU, sum of util, how many idle, samples with power, sum
of their watts]``. Of a long file, pieces from all over it are read.
"""

import glob
import json
import os
from typing import Any, Dict, Iterator, List

PIECES, PIECE = 16, 64 << 10
IDLE = 5.0  # percent


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what is asked for."""
    return {"schema": 1, "runs": [summed(run) for run in request["runs"]]}


def summed(run: str) -> List[float]:
    """Return the sums over all nodes, attempts and array tasks of a run."""
    sums = [0.0] * 5
    for top in (run, os.path.join(run, "tasks", "*")):
        pattern = os.path.join(glob.escape(run) + top[len(run) :], "metrics", "*", "node-*.jsonl")
        for path in sorted(glob.glob(pattern)):
            for gpu in gpus(path):
                util, power = number(gpu.get("util")), number(gpu.get("power_w"))
                if 0 <= util <= 100:
                    sums[0] += 1
                    sums[1] += util
                    sums[2] += util < IDLE
                    if 0 <= power < 1e5:
                        sums[3] += 1
                        sums[4] += power
    return sums


def number(value: Any) -> float:
    """Return a value that is a number, -1 for what is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e9 else -1.0


def gpus(path: str) -> Iterator[Dict[str, Any]]:
    """Yield the GPUs on the lines of a file, or of pieces of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = size <= PIECES * PIECE
            for number in range(1 if whole else PIECES):
                start = number * (size - PIECE) // (PIECES - 1) if not whole else 0
                file.seek(start)
                lines = file.read(size if whole else PIECE).split(b"\n")
                yield from found(lines[1 if start else 0 : -1])
    except OSError:
        return


def found(lines: List[bytes]) -> Iterator[Dict[str, Any]]:
    """Yield the GPUs on lines, leaving out what makes no sense."""
    for line in lines:
        try:
            record = json.loads(line.decode("utf-8", "replace"))
            listed = record.get("gpus") if isinstance(record, dict) else None
        except (ValueError, RecursionError):
            continue
        for gpu in listed if isinstance(listed, list) else []:
            if isinstance(gpu, dict):
                yield gpu
