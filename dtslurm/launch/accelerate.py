"""``accelerate``: Hugging Face's ``accelerate launch``, one per node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.torchrun import DECIDED, REMARKS
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import RawShell

# With static rendezvous, restarted ranks use the old addresses of their peers, or wait forever
# (pytorch/pytorch#135712). On a single node accelerate has no other rendezvous.
_USE_DTSLURM_RESTARTS = "use --max-restarts, with which dtslurm restarts the ranks"
_RENDEZVOUS_IS_SET = "dtslurm chooses the rendezvous"


class Accelerate(Launcher):
    """``accelerate launch`` with a configuration file that belongs to the run.

    Without a configuration file, accelerate silently reads the user's default one (``accelerate config``).
    Values that depend on the job are on the command line, which takes precedence over any file.
    For a plain script torchrun is sufficient; accelerate adds the FSDP, DeepSpeed and precision settings of a
    ``config_file``.
    """

    name = "accelerate"
    framework = "torch"
    start_modules = ("accelerate",)
    summary = "Hugging Face's accelerate launch, one per node"
    partial = "launchers/accelerate.sh.j2"
    step = "launchers/accelerate.step.sh.j2"
    agent = True
    starts_accelerate = True
    program = "accelerate launch"
    decided: ClassVar = {
        **dict.fromkeys(("num_machines", "num_processes", "machine_rank"), DECIDED["node_rank"]),
        **dict.fromkeys(("main_process_ip", "main_process_port", "same_network"), _RENDEZVOUS_IS_SET),
        **dict.fromkeys(("rdzv_backend", "rdzv_conf", "deepspeed_multinode_launcher"), _RENDEZVOUS_IS_SET),
        **dict.fromkeys(("module", "no_python"), DECIDED["module"]),
        "max_restarts": _USE_DTSLURM_RESTARTS,
    }
    remarks = REMARKS
    options: ClassVar = {
        "config_file": LauncherOption(
            "", "accelerate's configuration, for FSDP, DeepSpeed and similar", free=True, file=True
        ),
        "mixed_precision": LauncherOption(
            "", "precision, else the configuration's", ("no", "fp16", "bf16", "fp8")
        ),
    }

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the command line of one node."""
        config, precision = self.option(spec, "config_file"), self.option(spec, "mixed_precision")
        run_config = RawShell('--config_file="$DTSLURM_RUN_DIR/accelerate.yaml"')
        return (
            *(spec.python, "-m", "accelerate.commands.launch"),
            f"--config_file={config}" if config else run_config,
            f"--num_machines={layout.nodes}",
            f"--num_processes={layout.world_size}",
            *self._format_rendezvous_options(layout),
            *((f"--mixed_precision={precision}",) if precision else ()),
            *self.passed_on(spec),
            *(("--deepspeed_multinode_launcher=standard",) if config else ()),  # other launchers need ssh
            "--no_python",
            *rank_command,
        )

    def _format_rendezvous_options(self, layout: TaskLayout) -> tuple[str, ...]:
        if layout.nodes == 1:
            return ("--machine_rank=0", "--main_process_port=0")  # 0: accelerate chooses a free port
        return (
            RawShell('--machine_rank="$SLURM_NODEID"'),
            RawShell('--main_process_ip="$MASTER_ADDR"'),
            RawShell('--main_process_port="$MASTER_PORT"'),
            *("--rdzv_backend=static", "--same_network"),
        )


launcher = Accelerate()
