"""``torchrun``: one agent per node starts and watches that node's ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import Sh

_C10D_HINT = "add --launcher-option rdzv_backend=c10d"
_BY_LAYOUT = "use --nodes and --ntasks-per-node"
_BY_MEETING = "dtslurm chooses where the nodes meet; --launcher-option rdzv_backend=c10d chooses how"
_BY_SCRIPT = "name the script, or -m and the module, after the options"
_OWN_LOGS = "each rank's output goes to its log in the run directory before it reaches the launcher"
DECIDED = {
    **dict.fromkeys(("nproc_per_node", "node_rank"), _BY_LAYOUT),
    **dict.fromkeys(("master_addr", "master_port", "standalone", "local_addr"), _BY_MEETING),
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id", "rdzv_conf"), _BY_MEETING),
    **dict.fromkeys(("module", "no_python", "run_path"), _BY_SCRIPT),
}
REMARKS = dict.fromkeys(("tee", "redirects", "log_dir", "local_ranks_filter"), _OWN_LOGS)
ELASTIC = LauncherOption("", "MIN:MAX, to go on with as few as MIN nodes when others are lost", free=True)


class Torchrun(Launcher):
    """torch.distributed.run, with static rendezvous unless c10d is asked for.

    Static keeps rank 0 on the head node and needs no host name lookups; c10d hands out ranks as nodes
    arrive, and is needed for restarts by torchrun itself.

    ``nnodes=MIN:MAX`` makes the job elastic: while MIN nodes are left, the loss of others restarts the ranks
    on those, renumbered and fewer. Training code must then take its place and the world's size from the
    environment and go on from its last checkpoint. The nodes meet on the first one, which must not be lost.
    Where a supervisor is in the job, that starts the ranks again on the nodes that are left, whichever those
    are, and torchrun is told their number.
    """

    name = "torchrun"
    framework = "torch"
    summary = "torch.distributed.run, one agent per node"
    partial = "launchers/torchrun.sh.j2"
    step = "steps/torchrun.sh.j2"
    step_variables = ("PET_RDZV_ID",)
    agent = True
    starts_accelerate = True
    program = "torchrun"
    decided = DECIDED
    remarks = REMARKS
    agent_module: ClassVar[str] = "torch.distributed.run"
    options: ClassVar = {
        "rdzv_backend": LauncherOption("static", "how the nodes meet", ("static", "c10d")),
        "max_restarts": LauncherOption("0", "how often torchrun restarts the ranks after a failure"),
        "nnodes": ELASTIC,
    }

    def option(self, spec: JobSpec, key: str) -> str:
        """Return an option's value; elastic jobs meet by c10d unless another way is asked for."""
        if key == "rdzv_backend" and not self.has_option(spec, key) and self.elastic(spec):
            return "c10d"
        return super().option(spec, key)

    def elastic(self, spec: JobSpec) -> bool:
        """Return whether torchrun itself is to go on with fewer nodes, as ``nnodes=MIN:MAX`` asks for."""
        return bool(self.option(spec, "nnodes")) and not spec.supervised

    def least_nodes(self, spec: JobSpec, layout: TaskLayout) -> int:
        """Return MIN of ``nnodes=MIN:MAX``."""
        least = self.option(spec, "nnodes").partition(":")[0]
        return int(least) if least.isdecimal() else layout.nodes

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: restarts over several nodes need c10d, since static peers are not told."""
        static = self.option(spec, "rdzv_backend") == "static"
        if self.option(spec, "nnodes"):
            return self._check_elastic(spec, layout, static=static)
        if layout.nodes > 1 and static and self.option(spec, "max_restarts") != "0":
            return [f"{self.name} cannot restart several nodes that met by static rendezvous; {_C10D_HINT}"]
        return []

    def _check_elastic(self, spec: JobSpec, layout: TaskLayout, *, static: bool) -> list[str]:
        text = self.option(spec, "nnodes")
        bounds = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", text)
        if bounds is None or int(bounds[1]) > int(bounds[2]):
            return [f"launcher option nnodes must be MIN:MAX, as in nnodes=2:4; not {text!r}"]
        least, most, nodes = int(bounds[1]), int(bounds[2]), layout.nodes
        problems = []
        if most != nodes:
            problems.append(
                f"launcher option nnodes={text} goes up to {most} nodes, but the job has {nodes}; "
                f"ask for --nodes {most}, or give nnodes={min(least, nodes)}:{nodes}"
            )
        if spec.supervised:
            if self.option(spec, "max_restarts") != "0":
                problems.append(
                    "the supervisor restarts the ranks, as often as --max-restarts says; "
                    "leave out --launcher-option max_restarts"
                )
            return problems
        if static:
            problems.append(f"nodes that met by static rendezvous cannot be fewer later; {_C10D_HINT}")
        if self.option(spec, "max_restarts") == "0":
            problems.append(
                f"nnodes={text} goes on after a loss by restarting the ranks, and none is allowed; "
                "add --launcher-option max_restarts=3 or so"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return what makes ranks meet anew after a restart.

        Ranks would share the agents' store over all restarts, and be told the addresses of ranks that have
        ended (pytorch/pytorch#135712).
        """
        common = super().variables(spec, layout)
        if self.option(spec, "max_restarts") == "0":
            return common
        why = "or restarted ranks look for their peers where those were before"
        return {**common, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Variable(value="1", why=why)}

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the agent's command line."""
        return (
            *(spec.python, "-m", self.agent_module),
            self._number_of_nodes(spec, layout),
            f"--nproc-per-node={layout.ranks_per_node}",
            *self._meeting(spec, layout),
            f"--max-restarts={self.option(spec, 'max_restarts')}",
            *self.passed_on(spec),
            "--no-python",
            *rank_command,
        )

    def _number_of_nodes(self, spec: JobSpec, layout: TaskLayout) -> str:
        asked = self.option(spec, "nnodes")
        if asked and spec.supervised:
            return Sh('--nnodes="$SLURM_STEP_NUM_NODES"')  # those that this attempt has
        return f"--nnodes={asked or layout.nodes}"

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
            Sh('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
            Sh('--rdzv-conf="is_host=$is_host"'),
        )


launcher = Torchrun()
