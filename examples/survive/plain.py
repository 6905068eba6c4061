"""Fit a small network to a known function. This plain loop starts again at step 0 after each interruption."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

inputs = torch.linspace(-3, 3, 2048).unsqueeze(1)
data = TensorDataset(inputs, torch.sin(inputs))

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(net.state_dict(), "net.pt")
dist.destroy_process_group()
