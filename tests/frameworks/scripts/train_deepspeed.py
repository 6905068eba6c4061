"""DeepSpeed's engine, at the ZeRO stage that STAGE names."""

from __future__ import annotations

import os

import common
import deepspeed
import torch

common.listen()
deepspeed.init_distributed(dist_backend="gloo")
net = common.model()
stage = int(os.environ.get("STAGE", "1"))
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    },
)
world = torch.distributed.get_world_size()
print(
    f"world {world} rank {torch.distributed.get_rank()} ZeRO {engine.zero_optimization_stage()}", flush=True
)
if stage == 3:
    print("parameters held", sum(parameter.ds_tensor.numel() for parameter in net.parameters()), flush=True)
for step in range(20):
    common.fault(step)
    inputs, target = common.batch(step * world + torch.distributed.get_rank())
    loss = torch.nn.functional.mse_loss(engine(inputs), target)
    engine.backward(loss)
    engine.step()
    common.report(step, loss.item())
common.wait_to_hear()
common.end()
