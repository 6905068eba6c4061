"""``pyxis``: srun itself starts the task inside an enroot container."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtslurm.container.base import ContainerOptions, Runtime, pairs
from dtslurm.model.shell import Sh, quote


class Pyxis(Runtime):
    """Options on srun only: as #SBATCH lines they would put the batch script itself into the image."""

    name = "pyxis"
    preparation = "containers/pyxis.sh.j2"
    ending = ".sqsh"
    optional_program = "enroot"

    def srun_options(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the --container-* options; the variables named win over those set in the image."""
        mounts = quote(",".join(pairs(entry)))
        names = (
            "DTSLURM_RUN_DIR",
            "DTSLURM_ATTEMPT",
            "DTSLURM_CHECKPOINT_DIR",
            "DTSLURM_METRICS",
            *entry.variables,
        )
        image = f"--container-image={entry.image}" if entry.is_file else Sh('--container-image="$image"')
        return (
            image,
            Sh(f'--container-mounts="$DTSLURM_RUN_DIR:$DTSLURM_RUN_DIR",{mounts}'),
            f"--container-workdir={entry.work_dir}",
            "--no-container-mount-home",
            Sh(f"--container-env={','.join(names)}" + (',"$vendor_set"' if entry.vendor_script else "")),
            *entry.options,
        )

    def values(self, entry: ContainerOptions) -> Mapping[str, object]:
        """Return what imports the image once, so that not every node asks the registry for it."""
        return {
            "pull": self.pulled(entry),
            "reference": reference(entry),
            "vendor_script": entry.vendor_script,
        }

    def pull(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return ``enroot import``."""
        del entry
        return (str(self.optional_program), "import", "--output")

    def source(self, entry: ContainerOptions) -> str:
        """Return the reference as enroot wants it."""
        found = reference(entry)
        return found if "://" in found else f"docker://{found}"


def reference(entry: ContainerOptions) -> str:
    """Return the image as enroot wants it: the registry's host is set off by ``#``."""
    if "#" in entry.image:
        return entry.image.removeprefix("docker://")
    if entry.is_file or "://" in entry.reference:
        return entry.image
    host, slash, rest = entry.reference.partition("/")
    return f"{host}#{rest}" if slash and re.search(r"[.:]", host) else entry.reference


runtime = Pyxis()
