"""Fit a small network to a known function: the loop of plain.py, made fault-tolerant.

    dtslurm submit --ntasks-per-node 2 -l torchrun --signal-before 120 examples/survive/train.py

After it is killed, preempted or out of time, the script continues from its last checkpoint, also in the
middle of an epoch, and ends with the same weights as an uninterrupted run. The optional argument is a pause
in seconds after each step, which leaves time to interrupt the script.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dtslurm import train

pause = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
inputs = torch.linspace(-3, 3, 2048).unsqueeze(1)
data = TensorDataset(inputs, torch.sin(inputs))

with train.session(seed=0, save_every=50) as run:
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(run.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = train.Loader(data, batch_size=64)
    run.restore(model=model, optimizer=optimizer, loader=loader)
    for epoch in loader.epochs(20):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(run.device)), y.to(run.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(pause)
            run.end_step(loss=loss, epoch=epoch)
    if run.rank == 0:
        torch.save(net.state_dict(), "net.pt")
