"""Train a small net with real torch and `dtslurm.train`; FAULT=KIND@STEP happens once, to rank 1.

kill, segv, stop: it gets that signal. exit: it ends with 1. slow: it is slow for 15 steps. crawl: from then
on a step takes long, so that there is time for a fault from outside. full: rank 0 fills the disk of the
checkpoints. The first signal of each kind that a rank hears leaves a mark too. The final weights are left in
``final.pt`` of the run directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dtslurm import train

module: Any = sys.modules["dtslurm.train.session"]
module.COMPARE_S = 0.2  # 30 s otherwise
print("has loaded torch", flush=True)
faults = [word.split("@") for word in os.environ.get("FAULT", "").split(",") if word]
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
run_dir = Path(os.environ["DTSLURM_RUN_DIR"])
folder = Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
hear = module.Session._hear


def record_signal(session: Any, number: int, frame: Any) -> None:
    mark = run_dir / f"fault-{signal.Signals(number).name}"
    if not mark.exists():
        mark.write_text(str(time.time()))
    hear(session, number, frame)


module.Session._hear = record_signal


def fault(kind: str, step: int, rank: int) -> float:
    """Do it once in a run; return the seconds that each step takes from now on."""
    mark = Path(os.environ.get("MARK", run_dir), f"fault-{kind}")
    if rank != (0 if kind == "full" else 1) or mark.exists():
        return 0.0
    # What was saved last is complete then, so that it is known where training goes on.
    while not any(int(path.name.split("-")[1]) > step - 20 for path in folder.glob("step-*")):
        time.sleep(0.01)
    mark.write_text(str(time.time()))
    if kind == "exit":
        os._exit(1)
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    if kind == "full":
        file = os.open(folder / ".filler", os.O_WRONLY | os.O_CREAT)
        try:
            for _ in range(1000):  # 4 MB, more than there are
                os.write(file, bytes(4096))
        except OSError:
            print("the disk is full", flush=True)
    return {"crawl": 1.0, "slow": 0.1}.get(kind, 0.0)


inputs = torch.linspace(-3, 3, 1024).unsqueeze(1)
data = TensorDataset(inputs, torch.sin(inputs))
pace, quick_again = 0.0, 0
with train.session(seed=0, save_every=20, log_seconds=0.1, agree_every=5) as run:
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    model = run.watch(DistributedDataParallel(net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = train.Loader(data, batch_size=64)
    run.restore(model=model, optimizer=optimizer, loader=loader)
    for _epoch in loader.epochs(15):
        for x, y in loader:
            for kind, step in faults:
                if run.step == int(step):
                    pace = fault(kind, run.step, run.rank)
                    quick_again = run.step + 15 if kind == "slow" else 0
            if run.step == quick_again:
                pace = 0.0
            time.sleep(pace)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.end_step(loss=loss)
    if run.rank == 0:
        torch.save(net.state_dict(), run_dir / "final.pt")
