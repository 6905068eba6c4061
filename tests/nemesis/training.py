"""Training code that saves and resumes with dtslurm.train: ``training.py HISTORY RUN EPOCHS KILL_STEP``.

Its state has a parameter without gradients, a tensor that grows with each step, and a loader with a worker
process. The digest of its final state is the same after any number of restarts. The first attempt kills
itself after ``KILL_STEP`` steps, unless that is 0.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from body import append_event  # type: ignore[import-not-found]
from torch import nn

from dtslurm import train
from dtslurm.train.run_files import STALE

CLOCK_SKEW = os.environ.pop("CLOCK_SKEW", None)  # the history needs the true time
SAVE_EVERY = 3


class NoisySamples(torch.utils.data.Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """Samples with random numbers that the loader's worker draws."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), index / 40).double() + torch.rand(6).double() + np.random.rand()


class LossRecord:
    """All losses so far: a tensor that is longer in each checkpoint."""

    def __init__(self) -> None:
        self.losses = torch.zeros(0, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def digest(net: nn.Module, record: LossRecord) -> str:
    """Return the SHA-256 of the final state."""
    values = [*net.state_dict().values(), record.losses]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def main() -> int:
    history, run_name = sys.argv[1:3]
    epochs, kill_step = map(int, sys.argv[3:])
    torch.set_num_threads(1)  # so that the order of sums does not depend on the number of CPUs
    attempt = int(os.environ.get("DTSLURM_ATTEMPT") or 0)
    append_event(
        history, "begin", run_name, attempt, pid=os.getpid(), host=os.environ.get("SLURMD_NODENAME", "")
    )
    try:
        with train.session(seed=7, save_every=SAVE_EVERY, agree_every=1) as run:
            net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()
            net.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
            record = LossRecord()
            loader = train.Loader(NoisySamples(), 4, seed=3, num_workers=1)
            run.restore(net=net, optimizer=optimizer, record=record, loader=loader)
            append_event(history, "restored", run_name, attempt, step=run.step)
            latest: Path | None = run.checkpoints.latest
            for _ in loader.epochs(epochs):
                for inputs in loader:
                    time.sleep(0.1)
                    loss = net(inputs).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    record.losses = torch.cat([record.losses, loss.detach().reshape(1)])
                    run.end_step(loss=loss)
                    if run.checkpoints.latest not in {None, latest}:
                        latest = run.checkpoints.latest
                        append_event(history, "saved", run_name, attempt, path=str(latest))
                    if run.step == kill_step and attempt == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
        append_event(history, "trained", run_name, attempt, digest=digest(net, record))
        code = 0
    except SystemExit as leave:  # 85 after a signal; 87 writes nothing more
        code = int(str(leave.code))
        if code == STALE:
            raise
    append_event(history, "end", run_name, attempt, code=code)
    return code


if __name__ == "__main__":
    sys.exit(main())
