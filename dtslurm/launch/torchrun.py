"""``torchrun``: one agent per node starts and monitors that node's ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import RawShell

_C10D_HINT = "add --launcher-option rdzv_backend=c10d"
_USE_LAYOUT_OPTIONS = "use --nodes and --ntasks-per-node"
_RENDEZVOUS_IS_SET = (
    "dtslurm chooses the rendezvous address; set the backend with --launcher-option rdzv_backend=c10d"
)
_NAME_THE_SCRIPT = "give the script, or -m and the module, after the options"
_LOGS_ARE_SEPARATE = "dtslurm writes each rank's output to its log in the run directory"
DECIDED = {
    **dict.fromkeys(("nproc_per_node", "node_rank"), _USE_LAYOUT_OPTIONS),
    **dict.fromkeys(("master_addr", "master_port", "standalone", "local_addr"), _RENDEZVOUS_IS_SET),
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id", "rdzv_conf"), _RENDEZVOUS_IS_SET),
    **dict.fromkeys(("module", "no_python", "run_path"), _NAME_THE_SCRIPT),
}
REMARKS = dict.fromkeys(("tee", "redirects", "log_dir", "local_ranks_filter"), _LOGS_ARE_SEPARATE)
ELASTIC = LauncherOption("", "MIN:MAX, to continue with at least MIN nodes when nodes are lost", free=True)


class Torchrun(Launcher):
    """torch.distributed.run, with static rendezvous unless c10d is requested.

    Static rendezvous keeps rank 0 on the head node and needs no host name lookups. c10d assigns ranks in the
    order in which nodes join, and is needed for restarts by torchrun itself.

    ``nnodes=MIN:MAX`` makes the job elastic: after the loss of nodes, the ranks restart on the remaining
    ones, with new numbers and a smaller world size, as long as at least MIN nodes are left. Training code
    must then read its rank and the world size from the environment and continue from its last checkpoint. The
    first node hosts the rendezvous and must not be lost.
    In a job with a supervisor, the supervisor restarts the ranks on any remaining nodes and gives torchrun
    their number.
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
        "rdzv_backend": LauncherOption("static", "the rendezvous backend", ("static", "c10d")),
        "max_restarts": LauncherOption("0", "how often torchrun restarts the ranks after a failure"),
        "nnodes": ELASTIC,
    }

    def option(self, spec: JobSpec, key: str) -> str:
        """Return an option's value; elastic jobs use c10d unless another backend is requested."""
        if key == "rdzv_backend" and not self.has_option(spec, key) and self.elastic(spec):
            return "c10d"
        return super().option(spec, key)

    def elastic(self, spec: JobSpec) -> bool:
        """Return whether torchrun itself continues with fewer nodes, as ``nnodes=MIN:MAX`` requests."""
        return bool(self.option(spec, "nnodes")) and not spec.supervised

    def least_nodes(self, spec: JobSpec, layout: TaskLayout) -> int:
        """Return MIN of ``nnodes=MIN:MAX``."""
        minimum = self.option(spec, "nnodes").partition(":")[0]
        return int(minimum) if minimum.isdecimal() else layout.nodes

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: restarts on several nodes need c10d, as static ranks keep old addresses."""
        is_static = self.option(spec, "rdzv_backend") == "static"
        if self.option(spec, "nnodes"):
            return self._check_elastic(spec, layout, has_static_nodes=is_static)
        if layout.nodes > 1 and is_static and self.option(spec, "max_restarts") != "0":
            return [f"{self.name} cannot restart several nodes with static rendezvous; {_C10D_HINT}"]
        return []

    def _check_elastic(self, spec: JobSpec, layout: TaskLayout, *, has_static_nodes: bool) -> list[str]:
        text = self.option(spec, "nnodes")
        bounds = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", text)
        if bounds is None or int(bounds[1]) > int(bounds[2]):
            return [f"launcher option nnodes must be MIN:MAX, as in nnodes=2:4, not {text!r}"]
        minimum, maximum, nodes = int(bounds[1]), int(bounds[2]), layout.nodes
        problems = []
        if maximum != nodes:
            problems.append(
                f"launcher option nnodes={text} allows {maximum} nodes, but the job has {nodes}; "
                f"request --nodes {maximum}, or give nnodes={min(minimum, nodes)}:{nodes}"
            )
        if spec.supervised:
            if self.option(spec, "max_restarts") != "0":
                problems.append(
                    "the supervisor restarts the ranks, at most --max-restarts times; remove "
                    "--launcher-option max_restarts"
                )
            return problems
        if has_static_nodes:
            problems.append(f"with static rendezvous the number of nodes cannot shrink; {_C10D_HINT}")
        if self.option(spec, "max_restarts") == "0":
            problems.append(
                f"nnodes={text} continues after the loss of a node by restarting the ranks, but no "
                "restart is allowed; add, for example, --launcher-option max_restarts=3"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return the variable that makes ranks exchange new addresses after a restart.

        Otherwise ranks share the agents' store across restarts, and read the addresses of ranks that have
        ended (pytorch/pytorch#135712).
        """
        common = super().variables(spec, layout)
        if self.option(spec, "max_restarts") == "0":
            return common
        reason = "otherwise restarted ranks connect to the previous addresses of their peers"
        return {**common, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Variable(value="1", why=reason)}

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the command line of one node's agent."""
        return (
            *(spec.python, "-m", self.agent_module),
            self._format_nnodes(spec, layout),
            f"--nproc-per-node={layout.ranks_per_node}",
            *self._format_rendezvous_options(spec, layout),
            f"--max-restarts={self.option(spec, 'max_restarts')}",
            *self.passed_on(spec),
            "--no-python",
            *rank_command,
        )

    def _format_nnodes(self, spec: JobSpec, layout: TaskLayout) -> str:
        requested_nodes = self.option(spec, "nnodes")
        if requested_nodes and spec.supervised:
            return RawShell('--nnodes="$SLURM_STEP_NUM_NODES"')  # the nodes of this attempt
        return f"--nnodes={requested_nodes or layout.nodes}"

    def _format_rendezvous_options(self, spec: JobSpec, layout: TaskLayout) -> tuple[str, ...]:
        if layout.nodes == 1:
            return ("--standalone",)  # torchrun chooses a free port
        if self.option(spec, "rdzv_backend") == "static":
            return (
                RawShell('--node-rank="$SLURM_NODEID"'),
                RawShell('--master-addr="$MASTER_ADDR"'),
                RawShell('--master-port="$MASTER_PORT"'),
            )
        return (
            "--rdzv-backend=c10d",
            RawShell('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
            RawShell('--rdzv-conf="is_host=$is_host"'),
        )


launcher = Torchrun()
