"""``mpi``: ranks of one MPI world, started by srun, or by mpirun where srun cannot."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.jobs.job import JobSpec, TaskLayout

MPI_OPTION = LauncherOption(
    "profile",
    "srun's --mpi; profile: what the cluster's profile says, else Slurm's own default",
    ("profile", "pmix", "pmi2", "cray_shasta", "none"),
)


class Mpi(Launcher):
    """Slurm starts every rank and introduces them to each other by PMIx or PMI-2.

    ``start=mpirun`` is for an srun without any PMI (``srun --mpi=list`` shows what there is); it wants
    Open MPI's mpirun.
    """

    name = "mpi"
    summary = "one Slurm task per MPI rank (srun --mpi)"
    partial = "launchers/mpi.sh.j2"
    step = "steps/mpi.sh.j2"
    decided = dict.fromkeys(("np", "n", "host", "hostfile"), "use --nodes and --ntasks-per-node")
    options: ClassVar = {
        "mpi": MPI_OPTION,
        "start": LauncherOption("srun", "what starts the ranks", ("srun", "mpirun")),
    }

    def started_by(self, spec: JobSpec) -> str:
        """Return srun, or mpirun where that starts the ranks."""
        return self.option(spec, "start")

    def passed_on(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the words for options that dtslurm does not read; mpirun wants values as words."""
        words = super().passed_on(spec)
        if self.started_by(spec) == "srun":
            return words
        parts = [word.partition("=") for word in words]
        return tuple(piece for name, _, value in parts for piece in (name, *value.split()))

    def mpi(self, spec: JobSpec) -> str | None:
        """Return the ``--mpi`` asked for."""
        asked = self.option(spec, "mpi")
        return None if asked == "profile" else asked

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: what mpirun does not do."""
        del layout
        if self.option(spec, "start") == "srun":
            return []
        problems = []
        if spec.signal_before is not None:
            problems.append(
                "mpirun does not pass the early signal on to all ranks: "
                "leave out --signal-before or --launcher-option start=mpirun"
            )
        if spec.container is not None:
            problems.append(
                "mpirun would start the ranks outside the image: leave out start=mpirun or --container"
            )
        if self.mpi(spec) is not None:
            problems.append("--launcher-option mpi= is srun's: mpirun does not read it")
        return problems


launcher = Mpi()
