"""``shifter``: sbatch gets the image's name, and prepares the image on every node before the job starts."""

from __future__ import annotations

from collections.abc import Mapping

from dtslurm.container.base import ContainerOptions, Runtime


class Shifter(Runtime):
    """Shifter; the host's variables and global file systems are available in the container."""

    name = "shifter"
    program = "shifter"

    def check(self, entry: ContainerOptions) -> list[str]:
        """Return problems: shifter runs images that its gateway has pulled, not files."""
        return [f"shifter needs the name of an image, not the file {entry.image}"] if entry.is_file else []

    def directives(self, entry: ContainerOptions) -> Mapping[str, str]:
        """Return ``--image``."""
        name = entry.reference
        return {"image": name if name.startswith("docker:") else f"docker:{name}"}

    def prefix(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the shifter command."""
        volumes = [f"--volume={mount if ':' in mount else f'{mount}:{mount}'}" for mount in entry.mounts]
        return ("shifter", *volumes, f"--workdir={entry.work_dir}", *entry.options)


runtime = Shifter()
