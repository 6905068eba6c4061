"""A job of the user in which runs can be started."""

from __future__ import annotations

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class HeldAllocation:
    """A job as Slurm shows it, and the runs in it.

    Attributes:
        is_own: whether the job belongs to the caller; True if that is not known.
        nodes: the names of its nodes; empty unless the job runs.
        gpus_per_node, cpus_per_node: of each node; rounded down if the nodes differ.
        runs: the ids of the steps that run dtslurm's scripts.
        version: Slurm's version, empty if unknown.
    """

    job: JobStatus
    is_own: bool
    nodes: tuple[str, ...]
    gpus_per_node: int
    cpus_per_node: int
    runs: tuple[str, ...]
    version: str = ""
