"""The parts of a script that depend on the container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtslurm.container.base import ContainerOptions, Runtime
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import NO_CONTAINER, RoleSpec
from dtslurm.render.staging import staged_mounts

_ALWAYS_SET = ("MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")


class ContainerParts:
    """The parts that a container adds to a script; all are empty without a container."""

    def __init__(self, runtime: Runtime | None, entry: ContainerOptions | None) -> None:
        self._runtime_and_options = (runtime, entry) if runtime is not None and entry is not None else None

    def directives(self) -> Mapping[str, str]:
        """Return the sbatch directives that the container runtime needs."""
        return (
            self._runtime_and_options[0].directives(self._runtime_and_options[1])
            if self._runtime_and_options
            else {}
        )

    def words(self) -> tuple[str, ...]:
        """Return the words between srun's options and the task's command."""
        if self._runtime_and_options is None:
            return ()
        runtime, entry = self._runtime_and_options
        return (*runtime.srun_options(entry), *runtime.prefix(entry))

    def values(self) -> dict[str, object]:
        """Return the values for the templates."""
        if self._runtime_and_options is None:
            return {"container": None}
        runtime, entry = self._runtime_and_options
        return {"container": runtime.preparation, **runtime.values(entry)}


def spec_of_role(spec: JobSpec, role: RoleSpec) -> JobSpec:
    """Return the job with the image and the secrets of a role."""
    image, secrets = role.options.container or spec.container, role.options.secrets
    return replace(
        spec,
        container=None if image == NO_CONTAINER else image,
        secrets=spec.secrets if secrets is None else secrets,
    )


def container_entry(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    variables: Sequence[Mapping[str, str]] = (),
    exported: Sequence[str] = (),
) -> ContainerOptions | None:
    """Return the options of the job's container, None without an image.

    Args:
        variables: variables that the script sets, each with its ``name``.
        exported: names of the variables that the launcher's step sets.
    """
    if spec.container is None:
        return None
    node = choose_destination(spec.resources, profile).node
    vendor = node.gpus.vendor if node and node.gpus else "nvidia"
    return ContainerOptions(
        image=spec.container,
        work_dir=spec.work_dir,
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_per_node,
        mounts=(*profile.container.mounts, *spec.container_mounts, *staged_mounts(spec)),
        variables=(
            *_ALWAYS_SET,
            *exported,
            *(str(variable["name"]) for variable in variables),
            *(spec.roles.variables if spec.roles is not None else ()),
            *spec.secrets,
        ),
        vendor_script=bool(layout.nodes > 1 and profile.fabric and profile.fabric.setup),
        options=profile.container.options,
        gpu_vendor=vendor if layout.gpus_per_node else None,
        offline=profile.environment.offline,
    )
