"""Fully sharded data parallelism (FSDP2) over gloo."""

from __future__ import annotations

import common
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

common.listen()
torch.distributed.init_process_group("gloo")
world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(common.FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
mesh = init_device_mesh("cpu", (world,))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
weight = net[0].weight
assert isinstance(weight, DTensor)
print(f"world {world} rank {rank} holds {weight.to_local().numel()} of {weight.numel()}", flush=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
for step in range(20):
    common.fault(step)
    inputs, target = common.batch(step * world + rank)
    loss = torch.nn.functional.mse_loss(net(inputs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    common.report(step, loss.item())
common.wait_to_hear()
common.end()
