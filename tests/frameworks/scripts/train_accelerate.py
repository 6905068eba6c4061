"""Data-parallel training with an Accelerator."""

from __future__ import annotations

import common
import torch
from accelerate import Accelerator

common.listen()
accelerator = Accelerator()  # a job without GPUs sets ACCELERATE_USE_CPU
net = common.model()
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
world = accelerator.num_processes
print(f"world {world} rank {accelerator.process_index}", flush=True)
for step in range(20):
    common.fault(step)
    inputs, target = common.batch(step * world + accelerator.process_index)
    loss = torch.nn.functional.mse_loss(net(inputs), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    common.report(step, loss.item())
common.wait_to_hear()
common.end()
