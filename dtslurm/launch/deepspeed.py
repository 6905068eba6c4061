"""``deepspeed``: DeepSpeed's own launcher on every node, without ssh, or what may stand in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.srun import Srun
from dtslurm.launch.torchrun import DECIDED, Torchrun
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import Sh

# DeepSpeed numbers the devices from 0; on a shared node Slurm may have given this job others.
_OWN_DEVICES = Sh('${CUDA_VISIBLE_DEVICES+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"}')


_BY_LAYOUT = "use --nodes and --ntasks-per-node"
_NAME = "deepspeed"
_FORM: Mapping[str, LauncherOption] = {
    "form": LauncherOption(
        "launch", "what starts the ranks of a node", ("launch", "nossh", "torchrun", "srun")
    ),
}


class DeepSpeed(Launcher):
    """DeepSpeed's launcher, one per node; code that uses DeepSpeed runs as well by torchrun and srun.

    ``launch`` starts DeepSpeed's per-node launcher itself. ``nossh`` goes through the ``deepspeed`` command
    with a hostfile; that front end dies of SIGTERM and leaves its ranks no time to save, and ends with 0
    when the per-node launcher is killed.
    Neither form uses ssh or pdsh, nor reads ``.deepspeed_env``. With a hostfile, DeepSpeed does not turn
    CUDA_VISIBLE_DEVICES into ``--include``, which fails for numbers that do not start at 0.
    ``torchrun`` and ``srun`` start ranks as the launchers of those names do, the first with its options.
    """

    name = _NAME
    framework = "torch"
    summary = "DeepSpeed's launcher, one per node"
    partial = "launchers/deepspeed.sh.j2"
    step = "launchers/deepspeed.step.sh.j2"
    agent = True
    program = "DeepSpeed's launcher"
    decided: ClassVar = {
        **dict.fromkeys(
            ("num_nodes", "num_gpus", "include", "exclude", "hostfile", "world_info"), _BY_LAYOUT
        ),
        **dict.fromkeys(("node_rank", "launcher", "no_ssh", "force_multi"), _BY_LAYOUT),
        **dict.fromkeys(("master_addr", "master_port"), "dtslurm chooses where the nodes meet"),
        **dict.fromkeys(("module", "no_python", "no_local_rank"), DECIDED["module"]),
    }
    options = _FORM

    def chosen(self, spec: JobSpec) -> Launcher:
        """Return the launcher of the form asked for."""
        return {"torchrun": _by_torchrun, "srun": _by_srun}.get(self.option(spec, "form"), self)

    def needs_rendezvous(self, layout: TaskLayout) -> bool:
        """Return True: on one node too, or two jobs that share it meet on DeepSpeed's fixed port."""
        del layout
        return True

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return one node's command line."""
        if self.option(spec, "form") == "launch":
            program: tuple[str, ...] = ("deepspeed.launcher.launch", Sh('--world_info="$world_info"'))
        else:
            hostfile = Sh('--hostfile="$DTSLURM_RUN_DIR/hostfile"')
            program = ("deepspeed.launcher.runner", hostfile, "--no_ssh")
        return (
            *(spec.python, "-m", *program),
            Sh('--node_rank="$SLURM_NODEID"'),
            Sh('--master_addr="$MASTER_ADDR"'),
            Sh('--master_port="$MASTER_PORT"'),
            *self.passed_on(spec),
            *("--no_python", "--no_local_rank"),
            *(("env", _OWN_DEVICES) if layout.gpus_per_node else ()),
            *rank_command,
        )


class _ByTorchrun(Torchrun):
    name = _NAME
    options: ClassVar = {**_FORM, **Torchrun.options}


class _BySrun(Srun):
    name = _NAME
    decided = dict.fromkeys(Torchrun.options, "is for form=torchrun")
    options = _FORM


launcher = DeepSpeed()
_by_torchrun, _by_srun = _ByTorchrun(), _BySrun()
