"""``srun``: Slurm starts every rank; training code reads ``env://`` variables."""

from __future__ import annotations

from dtslurm.launch.base import Launcher


class Srun(Launcher):
    """One task per rank, without an agent process between Slurm and the training code."""

    name = "srun"
    summary = "one Slurm task per rank, torch env:// variables set"
    starts_accelerate = True


launcher = Srun()
