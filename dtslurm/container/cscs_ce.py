"""``cscs-ce``: CSCS's Container Engine, described by an environment definition file (EDF)."""

from __future__ import annotations

from dtslurm.container.base import ContainerOptions, Runtime


class CscsContainerEngine(Runtime):
    """CSCS's Container Engine; image, mounts and hooks are all in the EDF."""

    name = "cscs-ce"

    def check(self, entry: ContainerOptions) -> list[str]:
        """Return problems: settings that belong in the EDF, and an image that is no EDF."""
        problems = []
        if entry.mounts:
            problems.append(
                "the Container Engine reads mounts from the EDF; write them in the EDF instead of "
                "--container-mount"
            )
        if not entry.image.endswith(".toml") and "/" in entry.image:
            problems.append(
                f"the Container Engine needs an EDF (a .toml file or its name), not {entry.image}"
            )
        return problems

    def srun_options(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return ``--environment``."""
        return (f"--environment={entry.image}", *entry.options)


runtime = CscsContainerEngine()
