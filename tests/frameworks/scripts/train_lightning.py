"""A LightningModule under a Trainer that detects Slurm by itself."""

from __future__ import annotations

import os
import time
from typing import Any

import common
import lightning
import torch

LISTEN = os.environ.get("LISTEN")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = common.model()
        self.saved = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        common.fault(self.global_step)
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        common.report(self.global_step, loss.item())
        if LISTEN and self.global_step == 11:
            self.wait_until_saved()
        return loss

    def wait_until_saved(self) -> None:
        """Let the signal meet every rank in the same step, for they save together."""
        print("listening", flush=True)
        end = time.monotonic() + 120
        while not self.saved and time.monotonic() < end:
            time.sleep(0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        print(f"saving at {checkpoint['global_step']}", flush=True)
        self.saved = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
    num_nodes=int(os.environ["SLURM_NNODES"]),
    strategy="ddp",
    max_steps=20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    default_root_dir=os.environ["DTSLURM_CHECKPOINT_DIR"],
)
print(f"world {trainer.world_size} rank {trainer.global_rank}", flush=True)
data = [common.batch(step * trainer.world_size + trainer.global_rank) for step in range(20)]
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))
common.end()
