"""Library for training code: process group, checkpoints, resumption, stop signals. Requires only torch.

::

    with train.session(seed=0) as run:
        model = DistributedDataParallel(Net().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = train.Loader(dataset, batch_size=256)
        run.restore(model=model, optimizer=optimizer, loader=loader)
        for epoch in loader.epochs(10):
            for inputs, targets in loader:
                ...
                run.end_step(loss=loss)
"""

from __future__ import annotations

from dtslurm.train.checkpoint import Checkpointer, CheckpointFailed, Restored
from dtslurm.train.loader import Loader, ShardedBatchSampler
from dtslurm.train.place import RankInfo, find_place
from dtslurm.train.roles import Role, RoleInstance
from dtslurm.train.run_files import RunFiles, StaleAttempt
from dtslurm.train.session import Leave, Session, session
from dtslurm.train.shards import samples, shards, staged

__all__ = [
    "CheckpointFailed",
    "Checkpointer",
    "Leave",
    "Loader",
    "RankInfo",
    "Restored",
    "Role",
    "RoleInstance",
    "RunFiles",
    "Session",
    "ShardedBatchSampler",
    "StaleAttempt",
    "find_place",
    "samples",
    "session",
    "shards",
    "staged",
]
