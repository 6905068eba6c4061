"""``train.py FRAMEWORK``: fit a small network on the GPU by a framework, and say where it ran."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

STEPS = 30


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(dim=1, keepdim=True)


def report(step: int, loss: float) -> None:
    print(f"step {step} loss {loss:.6f}", flush=True)


def tell(version: str, device: object, gpus: int) -> None:
    print(f"version {version} on {device} world {gpus}", flush=True)


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Train with plain torch what is wrapped already."""
    for step in range(STEPS):
        inputs, target = (values.to(device) for values in batch(step))
        loss = nn.functional.mse_loss(net(inputs).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss.item())


def nccl() -> torch.device:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    return device


def ddp() -> None:
    device = nccl()
    net = nn.parallel.DistributedDataParallel(network().to(device), device_ids=[device.index])
    tell(torch.__version__, next(net.parameters()).device, torch.distributed.get_world_size())
    fit(net, torch.optim.AdamW(net.parameters(), lr=1e-2), device)
    torch.distributed.destroy_process_group()


def fsdp2() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = nccl()
    net = network().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (net[0], net[2], net):
        fully_shard(layer, mp_policy=policy)
    tell(torch.__version__, next(net.parameters()).device, torch.distributed.get_world_size())
    fit(net, torch.optim.AdamW(net.parameters(), lr=1e-2), device)
    torch.distributed.destroy_process_group()


def deepspeed() -> None:
    import deepspeed

    net = network()
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2), config=config
    )
    tell(deepspeed.__version__, engine.device, torch.distributed.get_world_size())
    for step in range(STEPS):
        inputs, target = (values.to(engine.device, torch.bfloat16) for values in batch(step))
        loss = nn.functional.mse_loss(engine(inputs).float(), target.float())
        engine.backward(loss)
        engine.step()
        report(step, loss.item())
    torch.distributed.destroy_process_group()


def accelerate() -> None:
    import accelerate
    from accelerate import Accelerator

    accelerator = Accelerator()
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    tell(accelerate.__version__, next(net.parameters()).device, accelerator.num_processes)
    print(
        "mixed precision", accelerator.mixed_precision, "by", accelerator.distributed_type.value, flush=True
    )
    for step in range(STEPS):
        inputs, target = (values.to(accelerator.device) for values in batch(step))
        loss = nn.functional.mse_loss(net(inputs), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss.item())
    accelerator.end_training()


def lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, pair: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(pair[0]), pair[1])
            report(index, loss.item())
            return loss

        def on_train_start(self) -> None:
            tell(lightning.__version__, self.device, self.trainer.world_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = [batch(step) for step in range(STEPS)]
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))


if __name__ == "__main__":
    {"ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed, "accelerate": accelerate, "lightning": lightning}[
        sys.argv[1]
    ]()
