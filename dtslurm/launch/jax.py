"""``jax``: one Slurm task per rank, for ``jax.distributed.initialize()`` without arguments."""

from __future__ import annotations

from dtslurm.launch.base import Launcher
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Jax(Launcher):
    """JAX ranks, which read SLURM_*; dtslurm sets the coordinator's address and the GPUs of each rank.

    Without these settings, JAX derives a port from the job id, which two steps of a job share, parses the
    node list itself, and assigns GPU i to rank i even if the task sees only one GPU.

    A rank that fails waits in JAX's shutdown barrier, 300 s by default, and then aborts with code 134. Pass
    ``shutdown_timeout_seconds`` to ``initialize``, or exit with ``os._exit`` for another exit code.
    """

    name = "jax"
    framework = "jax"
    summary = "one Slurm task per rank, for jax.distributed.initialize()"
    partial = "launchers/jax.sh.j2"

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: every rank needs GPUs of its own, each the same number."""
        del spec
        gpus, ranks = layout.gpus_per_node, layout.ranks_per_node
        if gpus % ranks:
            return [f"launcher jax gives each rank its own GPUs: {ranks} ranks cannot share {gpus} per node"]
        return []


launcher = Jax()
