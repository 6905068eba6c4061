"""``tensorflow``: one Slurm task per worker of a MultiWorkerMirroredStrategy."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class TensorFlow(Launcher):
    """Workers that find each other with TF_CONFIG, or with TensorFlow's own SlurmClusterResolver.

    TF_CONFIG is the default: the resolver sorts host names as text, which puts n10 in the place of n2, and
    fails without GPUs. ``--ntasks-per-node 1`` starts one worker per node with all of the node's GPUs.
    """

    name = "tensorflow"
    framework = "tensorflow"
    summary = "one Slurm task per worker, TF_CONFIG set"
    partial = "launchers/tensorflow.sh.j2"
    step = "steps/tensorflow.sh.j2"
    step_variables = ("WORKER_HOSTS",)
    options: ClassVar = {
        "form": LauncherOption(
            "tf_config",
            "how workers find each other: by TF_CONFIG, or by the script's SlurmClusterResolver",
            ("tf_config", "slurm"),
        ),
    }

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: GPUs that cannot be divided equally, and limits of the resolver."""
        gpus, ranks = layout.gpus_per_node, layout.ranks_per_node
        problems = []
        if gpus % ranks:
            problems.append(
                f"launcher tensorflow gives each worker its own GPUs: "
                f"{gpus} per node cannot be shared by {ranks} workers"
            )
        if self.option(spec, "form") == "slurm" and not gpus:
            problems.append(
                "TensorFlow's SlurmClusterResolver fails without GPUs; request GPUs, or remove "
                "--launcher-option form=slurm"
            )
        return problems


launcher = TensorFlow()
