"""``mpi``: ranks of one MPI world, started by srun, or by mpirun if srun has no PMI."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.jobs.job import JobSpec, TaskLayout

MPI_OPTION = LauncherOption(
    "profile",
    "srun's --mpi; profile: the value of the cluster's profile, else Slurm's own default",
    ("profile", "pmix", "pmi2", "cray_shasta", "none"),
)


class Mpi(Launcher):
    """One Slurm task per MPI rank, connected by PMIx or PMI-2.

    ``start=mpirun`` is for an srun without any PMI (``srun --mpi=list`` shows the available types). It needs
    Open MPI's mpirun.
    """

    name = "mpi"
    summary = "one Slurm task per MPI rank (srun --mpi)"
    partial = "launchers/mpi.sh.j2"
    step = "steps/mpi.sh.j2"
    decided = dict.fromkeys(("np", "n", "host", "hostfile"), "use --nodes and --ntasks-per-node")
    options: ClassVar = {
        "mpi": MPI_OPTION,
        "start": LauncherOption("srun", "the program that starts the ranks", ("srun", "mpirun")),
    }

    def started_by(self, spec: JobSpec) -> str:
        """Return ``srun`` or ``mpirun``, whichever starts the ranks."""
        return self.option(spec, "start")

    def passed_on(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the options that dtslurm does not interpret; mpirun takes values as separate words."""
        words = super().passed_on(spec)
        if self.started_by(spec) == "srun":
            return words
        options = [word.partition("=") for word in words]
        return tuple(word for name, _, value in options for word in (name, *value.split()))

    def mpi(self, spec: JobSpec) -> str | None:
        """Return the requested ``--mpi``."""
        requested_type = self.option(spec, "mpi")
        return None if requested_type == "profile" else requested_type

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: features that mpirun does not support."""
        del layout
        if self.option(spec, "start") == "srun":
            return []
        problems = []
        if spec.signal_before is not None:
            problems.append(
                "mpirun does not forward the early signal to all ranks: remove --signal-before or "
                "--launcher-option start=mpirun"
            )
        if spec.container is not None:
            problems.append(
                "mpirun would start the ranks outside the image: remove start=mpirun or --container"
            )
        if self.mpi(spec) is not None:
            problems.append("--launcher-option mpi= is an option of srun, which mpirun does not use")
        return problems


launcher = Mpi()
