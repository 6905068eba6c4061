"""``podman-hpc``: NERSC's rootless podman."""

from __future__ import annotations

from dtslurm.container.base import ContainerOptions, Runtime, pairs
from dtslurm.model.shell import RawShell


class PodmanHpc(Runtime):
    """podman-hpc; variables are passed by name only, so that the host's PATH does not replace the image's."""

    name = "podman-hpc"
    program = "podman-hpc"
    preparation = "containers/podman_hpc.sh.j2"

    def check(self, entry: ContainerOptions) -> list[str]:
        """Return problems: podman-hpc runs images by reference, not from files."""
        return [f"podman-hpc needs the name of an image, not the file {entry.image}"] if entry.is_file else []

    def prefix(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the run command, which uses the host's network and shared memory."""
        families = ("SLURM_*", "DTSLURM_*", *(("NCCL_*",) if entry.vendor_script else ()))
        return (
            *("podman-hpc", "run", "--rm", "--net=host", "--ipc=host"),
            *(("--gpu",) if entry.gpu_vendor else ()),
            *(f"--env={name}" for name in (*families, *entry.variables)),
            RawShell('--volume="$DTSLURM_RUN_DIR:$DTSLURM_RUN_DIR"'),
            *(f"--volume={pair}" for pair in pairs(entry)),
            f"--workdir={entry.work_dir}",
            *entry.options,
            entry.reference,
        )


runtime = PodmanHpc()
