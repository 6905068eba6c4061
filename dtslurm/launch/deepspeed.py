"""``deepspeed``: DeepSpeed's own launcher on every node, without ssh, or torchrun or srun in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.srun import Srun
from dtslurm.launch.torchrun import DECIDED, Torchrun
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import RawShell

# DeepSpeed numbers the devices from 0, but on a shared node Slurm may have allocated other devices.
_VISIBLE_DEVICES = RawShell('${CUDA_VISIBLE_DEVICES+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"}')


_USE_LAYOUT_OPTIONS = "use --nodes and --ntasks-per-node"
_NAME = "deepspeed"
_FORM_OPTION: Mapping[str, LauncherOption] = {
    "form": LauncherOption(
        "launch", "the program that starts the ranks of a node", ("launch", "nossh", "torchrun", "srun")
    ),
}


class DeepSpeed(Launcher):
    """DeepSpeed's launcher, one per node. Code that uses DeepSpeed also runs under torchrun and srun.

    ``launch`` starts DeepSpeed's per-node launcher directly. ``nossh`` goes through the ``deepspeed`` command
    with a hostfile; that front end exits at SIGTERM without giving its ranks time to save, and exits with 0
    if the per-node launcher is killed.
    Neither form uses ssh or pdsh, or reads ``.deepspeed_env``. With a hostfile, DeepSpeed does not convert
    CUDA_VISIBLE_DEVICES to ``--include``, which fails for device numbers that do not start at 0.
    ``torchrun`` and ``srun`` start ranks as the launchers of those names do, ``torchrun`` also with its
    options.
    """

    name = _NAME
    framework = "torch"
    start_modules = ("deepspeed",)
    summary = "DeepSpeed's launcher, one per node"
    partial = "launchers/deepspeed.sh.j2"
    step = "launchers/deepspeed.step.sh.j2"
    agent = True
    program = "DeepSpeed's launcher"
    decided: ClassVar = {
        **dict.fromkeys(
            ("num_nodes", "num_gpus", "include", "exclude", "hostfile", "world_info"), _USE_LAYOUT_OPTIONS
        ),
        **dict.fromkeys(("node_rank", "launcher", "no_ssh", "force_multi"), _USE_LAYOUT_OPTIONS),
        **dict.fromkeys(("master_addr", "master_port"), "dtslurm chooses the rendezvous address"),
        **dict.fromkeys(("module", "no_python", "no_local_rank"), DECIDED["module"]),
    }
    options = _FORM_OPTION

    def chosen(self, spec: JobSpec) -> Launcher:
        """Return the launcher of the requested form."""
        return {"torchrun": _torchrun_form, "srun": _srun_form}.get(self.option(spec, "form"), self)

    def needs_rendezvous(self, layout: TaskLayout) -> bool:
        """Return True, even for one node: jobs that share a node would all use DeepSpeed's fixed port."""
        del layout
        return True

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the command line of one node."""
        if self.option(spec, "form") == "launch":
            program: tuple[str, ...] = ("deepspeed.launcher.launch", RawShell('--world_info="$world_info"'))
        else:
            hostfile = RawShell('--hostfile="$DTSLURM_RUN_DIR/hostfile"')
            program = ("deepspeed.launcher.runner", hostfile, "--no_ssh")
        return (
            *(spec.python, "-m", *program),
            RawShell('--node_rank="$SLURM_NODEID"'),
            RawShell('--master_addr="$MASTER_ADDR"'),
            RawShell('--master_port="$MASTER_PORT"'),
            *self.passed_on(spec),
            *("--no_python", "--no_local_rank"),
            *(("env", _VISIBLE_DEVICES) if layout.gpus_per_node else ()),
            *rank_command,
        )


class _TorchrunForm(Torchrun):
    name = _NAME
    options: ClassVar = {**_FORM_OPTION, **Torchrun.options}


class _SrunForm(Srun):
    name = _NAME
    decided = dict.fromkeys(Torchrun.options, "is for form=torchrun")
    options = _FORM_OPTION


launcher = DeepSpeed()
_torchrun_form, _srun_form = _TorchrunForm(), _SrunForm()
