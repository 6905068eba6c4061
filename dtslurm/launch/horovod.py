"""``horovod``: one Slurm task per rank, with rendezvous over MPI or Gloo."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.mpi import MPI_OPTION
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Horovod(Launcher):
    """Horovod with ranks started by Slurm; horovodrun itself needs ssh and always exits with code 1.

    ``form=gloo`` starts Horovod's rendezvous server on the first node and needs no MPI.
    """

    name = "horovod"
    summary = "one Slurm task per Horovod rank, by MPI or Gloo"
    partial = "launchers/horovod.sh.j2"
    step = "steps/horovod.sh.j2"
    options: ClassVar = {
        "form": LauncherOption(
            "mpi", "the communication library with which Horovod was built", ("mpi", "gloo")
        ),
        "mpi": MPI_OPTION,
    }

    def mpi(self, spec: JobSpec) -> str | None:
        """Return the requested ``--mpi``; Gloo needs none."""
        if self.option(spec, "form") == "gloo":
            return "none"
        requested_type = self.option(spec, "mpi")
        return None if requested_type == "profile" else requested_type

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: ``mpi=`` without MPI, or a container, in which the Gloo server would not run."""
        del layout
        if self.option(spec, "form") == "gloo" and spec.container is not None:
            return ["Horovod's Gloo server would run outside the image: use form=mpi with --container"]
        if self.option(spec, "form") == "gloo" and self.option(spec, "mpi") not in {"profile", "none"}:
            return ["--launcher-option mpi= is for form=mpi: Gloo does not use MPI"]
        return []


launcher = Horovod()
