"""``checkpoints.py GIB``: save weights on the GPU by dtslurm's training loop, or restore them; say how long.

A second attempt restores and ends. Beside it the same weights are saved by torch.save.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dtslurm import train


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def digest(model: nn.Module) -> int:
    return sum(int(weight.detach().view(torch.int32).sum(dtype=torch.int64)) for weight in model.parameters())


def save_by_torch(model: nn.Module, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


gib = int(sys.argv[1])
with train.session(save_minutes=None, keep=1) as run:
    model = nn.ParameterList(torch.empty(1 << 28, device=run.device) for _ in range(gib))
    restored = seconds(lambda: run.restore(model=model))
    if run.step:
        print(f"restored_s {restored:.3f}\ndigest {digest(model)}", flush=True)
        sys.exit()
    for weight in model:
        nn.init.normal_(weight)
    print(f"digest {digest(model)}", flush=True)
    path = Path(os.environ["DTSLURM_CHECKPOINT_DIR"], "plain.pt")
    print(f"torch_save_s {seconds(lambda: save_by_torch(model, path)):.3f}", flush=True)
    path.unlink()
    run.end_step()
    print(f"save_s {seconds(lambda: run.checkpoint(wait=True)):.3f}", flush=True)
    run.end_step()
    print(f"copy_s {seconds(run.checkpoint):.3f}", flush=True)  # the rest is written beside training
