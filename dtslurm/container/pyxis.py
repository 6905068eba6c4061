"""``pyxis``: srun itself starts the task inside an enroot container."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtslurm.container.base import ContainerOptions, Runtime, pairs
from dtslurm.model.shell import RawShell, quote


class Pyxis(Runtime):
    """Pyxis, with options on srun only: as #SBATCH lines they would run the batch script inside the image."""

    name = "pyxis"
    preparation = "containers/pyxis.sh.j2"
    ending = ".sqsh"
    optional_program = "enroot"

    def srun_options(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the --container-* options; the named variables override those set in the image."""
        mounts = quote(",".join(pairs(entry)))
        names = (
            "DTSLURM_RUN_DIR",
            "DTSLURM_ATTEMPT",
            "DTSLURM_CHECKPOINT_DIR",
            "DTSLURM_METRICS",
            *entry.variables,
        )
        image = (
            f"--container-image={entry.image}" if entry.is_file else RawShell('--container-image="$image"')
        )
        return (
            image,
            RawShell(f'--container-mounts="$DTSLURM_RUN_DIR:$DTSLURM_RUN_DIR",{mounts}'),
            f"--container-workdir={entry.work_dir}",
            "--no-container-mount-home",
            RawShell(
                f"--container-env={','.join(names)}" + (',"$vendor_set"' if entry.vendor_script else "")
            ),
            *entry.options,
        )

    def values(self, entry: ContainerOptions) -> Mapping[str, object]:
        """Return the values for the template that imports the image once, instead of once on every node."""
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
        """Return the reference with a scheme, in enroot's notation."""
        image_reference = reference(entry)
        return image_reference if "://" in image_reference else f"docker://{image_reference}"


def reference(entry: ContainerOptions) -> str:
    """Return the image in enroot's notation, which separates the registry's host with ``#``."""
    if "#" in entry.image:
        return entry.image.removeprefix("docker://")
    if entry.is_file or "://" in entry.reference:
        return entry.image
    host, slash, image_name = entry.reference.partition("/")
    return f"{host}#{image_name}" if slash and re.search(r"[.:]", host) else entry.reference


runtime = Pyxis()
