"""Plain DistributedDataParallel over gloo, for the launchers that are torchrun with something added."""

from __future__ import annotations

import os

import common
import torch

common.listen()
torch.distributed.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(common.model())
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
world = torch.distributed.get_world_size()
print(f"world {world} rank {os.environ['RANK']}", flush=True)
for step in range(20):
    common.fault(step)
    inputs, target = common.batch(step * world + torch.distributed.get_rank())
    loss = torch.nn.functional.mse_loss(net(inputs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    common.report(step, loss.item())
common.wait_to_hear()
common.end()
