"""``apptainer`` and ``singularity``: the runtime program runs the task's command inside a .sif image."""

from __future__ import annotations

from collections.abc import Mapping

from dtslurm.container.base import ContainerOptions, Runtime, pairs
from dtslurm.model.shell import RawShell

_GPU_FLAGS = {"nvidia": ("--nv",), "amd": ("--rocm",)}


class Apptainer(Runtime):
    """Apptainer: host variables are passed on; without a PID namespace, Slurm's signals reach the ranks."""

    name = "apptainer"
    program = "apptainer"
    preparation = "containers/apptainer.sh.j2"
    ending = ".sif"

    def prefix(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the exec command; the user's own site packages (``~/.local``) are disabled."""
        return (
            *(str(self.program), "exec"),
            *_GPU_FLAGS.get(entry.gpu_vendor or "", ()),
            "--env=PYTHONNOUSERSITE=1",
            RawShell('--bind="$DTSLURM_RUN_DIR"'),
            *(f"--bind={pair}" for pair in pairs(entry)),
            f"--pwd={entry.work_dir}",
            *entry.options,
            entry.image if entry.is_file else RawShell('"$image"'),
        )

    def values(self, entry: ContainerOptions) -> Mapping[str, object]:
        """Return the values for the template that pulls the image once to a folder that all nodes see."""
        return {"pull": self.pulled(entry)}

    def pull(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return ``apptainer pull``."""
        del entry
        return (str(self.program), "pull")


class Singularity(Apptainer):
    """Apptainer under its former name."""

    name = "singularity"
    program = "singularity"


runtime = Apptainer()
singularity = Singularity()
