"""A small training run without dependencies: each rank fits a line to points by gradient descent.

``D`` in an empty ``dtslurm top`` submits this module to cluster ``local``. Every rank writes its steps to its
log and to ``$DTSLURM_METRICS``.
"""

from __future__ import annotations

import json
import os
import random
import time

STEPS, PAUSE_S = 240, 0.25
_POINT_COUNT, _LEARNING_RATE = 64, 0.02


def train(rank: int, steps: int, pause: float) -> float:
    """Run ``steps`` steps of gradient descent, each after ``pause`` seconds, and return the last loss."""
    generator = random.Random(rank)  # noqa: S311 (not a secret)
    points = [
        (x, 3.0 * x - 1.0 + generator.gauss(0, 0.3))
        for x in (generator.uniform(-2, 2) for _ in range(_POINT_COUNT))
    ]
    slope = offset = loss = 0.0
    previous_time = time.time()
    for step in range(1, steps + 1):
        errors = [(slope * x + offset - y, x) for x, y in points]
        loss = sum(error * error for error, _ in errors) / _POINT_COUNT
        slope -= _LEARNING_RATE * sum(2 * error * x for error, x in errors) / _POINT_COUNT
        offset -= _LEARNING_RATE * sum(2 * error for error, _ in errors) / _POINT_COUNT
        time.sleep(pause * (0.9 + 0.2 * generator.random()))
        now = time.time()
        print(f"step {step}/{steps} loss {loss:.4f}", flush=True)  # noqa: T201 (a rank's log)
        write_metrics({"time": now, "rank": rank, "step": step, "total_steps": steps, "loss": loss,
                       "step_time_s": now - previous_time})  # fmt: skip
        previous_time = now
    return loss


def write_metrics(values: dict[str, float]) -> None:
    """Append a record to the file ``$DTSLURM_METRICS``, if that variable is set."""
    path = os.environ.get("DTSLURM_METRICS")
    if path:
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 (one write of one line)
            file.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    train(int(os.environ.get("RANK", "0")), STEPS, PAUSE_S)
