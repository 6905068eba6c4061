"""ZeRO stage 1 with DeepSpeed's engine."""

from __future__ import annotations

import common
import deepspeed
import torch

common.listen()
deepspeed.init_distributed(dist_backend="gloo")
net = common.model()
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
world = torch.distributed.get_world_size()
print(f"world {world} rank {torch.distributed.get_rank()}", flush=True)
for step in range(20):
    common.fault(step)
    inputs, target = common.batch(step * world + torch.distributed.get_rank())
    loss = torch.nn.functional.mse_loss(engine(inputs), target)
    engine.backward(loss)
    engine.step()
    common.report(step, loss.item())
common.wait_to_hear()
common.end()
