"""``accelerate``: Hugging Face's ``accelerate launch``, one per node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.torchrun import DECIDED, REMARKS
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import Sh

# By static rendezvous restarted ranks look for their peers where those were before, or wait for ever
# (pytorch/pytorch#135712); accelerate gives a single node no other.
_RESTARTS = "use --max-restarts, by which dtslurm restarts the ranks"
_MEETS = "dtslurm chooses how and where the nodes meet"


class Accelerate(Launcher):
    """``accelerate launch`` with a configuration of the run's own.

    Without one, accelerate silently takes values from the configuration that its user once answered
    questions for. On the command line stands all that depends on the job, which wins over any file.
    A plain script needs no more than torchrun; what accelerate adds are the FSDP, DeepSpeed and precision
    settings of a ``config_file``.
    """

    name = "accelerate"
    framework = "torch"
    summary = "Hugging Face's accelerate launch, one per node"
    partial = "launchers/accelerate.sh.j2"
    step = "launchers/accelerate.step.sh.j2"
    agent = True
    starts_accelerate = True
    program = "accelerate launch"
    decided: ClassVar = {
        **dict.fromkeys(("num_machines", "num_processes", "machine_rank"), DECIDED["node_rank"]),
        **dict.fromkeys(("main_process_ip", "main_process_port", "same_network"), _MEETS),
        **dict.fromkeys(("rdzv_backend", "rdzv_conf", "deepspeed_multinode_launcher"), _MEETS),
        **dict.fromkeys(("module", "no_python"), DECIDED["module"]),
        "max_restarts": _RESTARTS,
    }
    remarks = REMARKS
    options: ClassVar = {
        "config_file": LauncherOption(
            "", "accelerate's configuration, for FSDP, DeepSpeed and the like", free=True
        ),
        "mixed_precision": LauncherOption(
            "", "precision, else the configuration's", ("no", "fp16", "bf16", "fp8")
        ),
    }

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return one node's command line."""
        config, precision = self.option(spec, "config_file"), self.option(spec, "mixed_precision")
        own = Sh('--config_file="$DTSLURM_RUN_DIR/accelerate.yaml"')
        return (
            *(spec.python, "-m", "accelerate.commands.launch"),
            f"--config_file={config}" if config else own,
            f"--num_machines={layout.nodes}",
            f"--num_processes={layout.world_size}",
            *self._meeting(layout),
            *((f"--mixed_precision={precision}",) if precision else ()),
            *self.passed_on(spec),
            *(("--deepspeed_multinode_launcher=standard",) if config else ()),  # others want ssh
            "--no_python",
            *rank_command,
        )

    def _meeting(self, layout: TaskLayout) -> tuple[str, ...]:
        if layout.nodes == 1:
            return ("--machine_rank=0", "--main_process_port=0")  # finds a free port by itself
        return (
            Sh('--machine_rank="$SLURM_NODEID"'),
            Sh('--main_process_ip="$MASTER_ADDR"'),
            Sh('--main_process_port="$MASTER_PORT"'),
            *("--rdzv_backend=static", "--same_network"),
        )


launcher = Accelerate()
