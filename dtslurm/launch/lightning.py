"""``lightning``: Slurm starts every rank, and Lightning detects its Slurm environment."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Lightning(Launcher):
    """One task per rank, with Lightning's SLURMEnvironment, which saves a checkpoint on SIGUSR1.

    After saving, Lightning calls ``scontrol requeue``, without a limit, and no setting outside the code turns
    that off. To keep the decision about restarts in one place, ranks find a ``scontrol`` of the run first in
    PATH, which refuses to requeue. Lightning logs the failure and trains on until the time limit.
    ``requeue=lightning`` leaves requeuing to Lightning.
    """

    name = "lightning"
    framework = "torch"
    summary = "one Slurm task per rank, for Lightning's Slurm environment"
    partial = "launchers/lightning.sh.j2"
    step = "launchers/lightning.step.sh.j2"
    early_signal = "USR1"
    ignore_signal = False
    reads_sizes = True
    place = ("RANK", "LOCAL_RANK")
    options: ClassVar = {
        "requeue": LauncherOption(
            "off",
            "whether Lightning may requeue the job after it has saved a checkpoint",
            ("off", "lightning"),
        ),
    }

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: job names that hide the job from Lightning, and two requeue mechanisms."""
        del layout
        problems = []
        if spec.name in {"bash", "interactive"}:
            problems.append(
                f"Lightning treats a job named {spec.name!r} as an interactive shell and starts a "
                "single process; set another --job-name"
            )
        if self.resumes(spec) and spec.max_restarts:
            problems.append(
                "--max-restarts and --launcher-option requeue=lightning would both requeue the job"
            )
        if self.resumes(spec) and spec.requeue is False:
            problems.append("--no-requeue and --launcher-option requeue=lightning contradict each other")
        return problems

    def resumes(self, spec: JobSpec) -> bool:
        """Return whether Lightning requeues the job after it has saved."""
        return self.option(spec, "requeue") == "lightning"


launcher = Lightning()
