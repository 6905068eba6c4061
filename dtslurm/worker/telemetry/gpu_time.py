"""Sums of the GPU samples of runs, computed on the machine that holds the samples.

Sent over stdin (`dtslurm.services.wiring.remote_query`). The request is ``{"runs": [DIR]}``.
The answer has for each run ``[samples of one GPU, sum of util, idle samples, samples with power, sum of
the power in watts]``. Of a long file, blocks at even distances are read.
"""

import glob
import os
from typing import Any, Dict, Iterator, List

from ..lib.json_records import finite_number, parse_lines

PIECES, PIECE = 16, 64 << 10
IDLE = 5.0  # percent


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the response to a request."""
    return {"schema": 1, "runs": [summed(run) for run in request["runs"]]}


def summed(run: str) -> List[float]:
    """Return the sums over all nodes, attempts and array tasks of a run."""
    sums = [0.0] * 5
    for top in (run, os.path.join(run, "tasks", "*")):
        pattern = os.path.join(glob.escape(run) + top[len(run) :], "metrics", "*", "node-*.jsonl")
        for path in sorted(glob.glob(pattern)):
            for gpu in gpus(path):
                util, power = finite_number(gpu.get("util")), finite_number(gpu.get("power_w"))
                if util is not None and 0 <= util <= 100:
                    sums[0] += 1
                    sums[1] += util
                    sums[2] += util < IDLE
                    if power is not None and 0 <= power < 1e5:
                        sums[3] += 1
                        sums[4] += power
    return sums


def gpus(path: str) -> Iterator[Dict[str, Any]]:
    """Yield the GPUs in the samples of a file, or of blocks of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            read_whole = size <= PIECES * PIECE
            for index in range(1 if read_whole else PIECES):
                start = index * (size - PIECE) // (PIECES - 1) if not read_whole else 0
                file.seek(start)
                lines = file.read(size if read_whole else PIECE).split(b"\n")
                yield from parse_gpus(lines[1 if start else 0 : -1])
    except OSError:
        return


def parse_gpus(lines: List[bytes]) -> Iterator[Dict[str, Any]]:
    """Yield the GPUs in lines of samples; skip invalid lines."""
    for record in parse_lines(lines):
        gpu_list = record.get("gpus")
        for gpu in gpu_list if isinstance(gpu_list, list) else []:
            if isinstance(gpu, dict):
                yield gpu
