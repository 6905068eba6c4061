"""``horovod``: one Slurm task per rank, met by MPI or by Gloo."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.launch.mpi import MPI_OPTION
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Horovod(Launcher):
    """What horovodrun does, done by Slurm: horovodrun itself needs ssh and always ends with code 1.

    ``form=gloo`` starts Horovod's rendezvous server on the first node and needs no MPI at all.
    """

    name = "horovod"
    summary = "one Slurm task per Horovod rank, by MPI or Gloo"
    partial = "launchers/horovod.sh.j2"
    step = "steps/horovod.sh.j2"
    options: ClassVar = {
        "form": LauncherOption("mpi", "how ranks meet, as Horovod was built", ("mpi", "gloo")),
        "mpi": MPI_OPTION,
    }

    def mpi(self, spec: JobSpec) -> str | None:
        """Return the ``--mpi`` asked for; Gloo needs none."""
        if self.option(spec, "form") == "gloo":
            return "none"
        asked = self.option(spec, "mpi")
        return None if asked == "profile" else asked

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: an MPI asked for where none is used, a server that could not import Horovod."""
        del layout
        if self.option(spec, "form") == "gloo" and spec.container is not None:
            return ["Horovod's Gloo server would run outside the image: use form=mpi with --container"]
        if self.option(spec, "form") == "gloo" and self.option(spec, "mpi") not in {"profile", "none"}:
            return ["--launcher-option mpi= is for form=mpi: Gloo meets without MPI"]
        return []


launcher = Horovod()
