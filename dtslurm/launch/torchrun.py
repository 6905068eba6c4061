"""``torchrun``: one agent per node starts and watches that node's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.job import JobSpec, TaskLayout
from dtslurm.model.shell import Sh

_C10D_HINT = "add --launcher-option rdzv_backend=c10d"


class Torchrun(Launcher):
    """torch.distributed.run, with static rendezvous unless c10d is asked for.

    Static keeps rank 0 on the head node and needs no host name lookups; c10d hands out ranks as nodes
    arrive, and is needed for restarts by torchrun itself.
    """

    name = "torchrun"
    summary = "torch.distributed.run, one agent per node"
    partial = "launchers/torchrun.sh.j2"
    agent = True
    agent_module: ClassVar[str] = "torch.distributed.run"
    options: ClassVar = {
        "rdzv_backend": LauncherOption("static", "how the nodes meet", ("static", "c10d")),
        "max_restarts": LauncherOption("0", "how often torchrun restarts the ranks after a failure"),
    }

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: restarts over several nodes need c10d, since static peers are not told."""
        static = self.option(spec, "rdzv_backend") == "static"
        if layout.nodes > 1 and static and self.option(spec, "max_restarts") != "0":
            return [f"{self.name} cannot restart several nodes that met by static rendezvous; {_C10D_HINT}"]
        return []

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the agent's command line."""
        return (
            *(spec.python, "-m", self.agent_module),
            f"--nnodes={layout.nodes}",
            f"--nproc-per-node={layout.ranks_per_node}",
            *self._meeting(spec, layout),
            f"--max-restarts={self.option(spec, 'max_restarts')}",
            "--no-python",
            *rank_command,
        )

    def _meeting(self, spec: JobSpec, layout: TaskLayout) -> tuple[str, ...]:
        if layout.nodes == 1:
            return ("--standalone",)  # finds a free port by itself
        if self.option(spec, "rdzv_backend") == "static":
            return (
                Sh('--node-rank="$SLURM_NODEID"'),
                Sh('--master-addr="$MASTER_ADDR"'),
                Sh('--master-port="$MASTER_PORT"'),
            )
        return (
            "--rdzv-backend=c10d",
            Sh('--rdzv-id="$SLURM_JOB_ID-$DTSLURM_ATTEMPT"'),
            Sh('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
            Sh('--rdzv-conf="is_host=$is_host"'),
        )


launcher = Torchrun()
