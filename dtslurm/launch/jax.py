"""``jax``: one Slurm task per rank, which ``jax.distributed.initialize()`` finds by itself."""

from __future__ import annotations

from dtslurm.launch.base import Launcher
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Jax(Launcher):
    """JAX reads ranks from SLURM_*; the coordinator's place and each rank's GPUs are told by us.

    Left alone, JAX would take a port by the job's number, which two steps of a job share, parse the node
    list itself, and give rank i GPU number i even where the task sees one GPU only.

    A rank that fails hangs in JAX's shutdown barrier, 300 s by default, and then aborts with code 134: pass
    ``shutdown_timeout_seconds`` to ``initialize``, or leave by ``os._exit`` for a code of your own.
    """

    name = "jax"
    framework = "jax"
    summary = "one Slurm task per rank, for jax.distributed.initialize()"
    partial = "launchers/jax.sh.j2"

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: every rank needs GPUs of its own, the same number each."""
        del spec
        gpus, ranks = layout.gpus_per_node, layout.ranks_per_node
        if gpus % ranks:
            return [f"launcher jax gives each rank its own GPUs: {ranks} ranks cannot share {gpus} per node"]
        return []


launcher = Jax()
