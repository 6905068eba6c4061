"""The interface of a container runtime: the options and words that start a task inside an image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import ClassVar

from dtslurm.model.shell import RawShell, join
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ContainerOptions:
    """The container settings of a job.

    Attributes:
        image: a file, or a reference such as ``nvcr.io/nvidia/pytorch:25.01-py3``.
        mounts: ``SRC[:DST[:ro]]``, in addition to the run directory and the working directory.
        variables: names of the variables that the script sets, which must override the image's own.
        vendor_script: whether a fabric's own script sets NCCL variables in addition.
        options: the cluster's own options for the runtime.
        gpu_vendor: None if no GPU is requested.
        offline: compute nodes have no internet, so an image is pulled before the job, or not at all.
    """

    image: str
    work_dir: str
    nodes: int
    ranks_per_node: int
    mounts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    vendor_script: bool = False
    options: tuple[str, ...] = ()
    gpu_vendor: str | None = None
    offline: bool = False

    @property
    def is_file(self) -> bool:
        """Whether the image is a file on the cluster rather than a reference into a registry."""
        return self.image.startswith(("/", "./", "../", "~")) or self.image.endswith(
            (".sif", ".sqsh", ".toml")
        )

    @property
    def reference(self) -> str:
        """The image in Docker's notation, ``HOST/NAME:TAG``, even if given in another runtime's notation.

        A file, or a reference with a scheme other than ``docker://``, is unchanged.
        """
        image_name = self.image.removeprefix("docker://")
        return self.image if self.is_file or "://" in image_name else image_name.replace("#", "/", 1)

    @property
    def url(self) -> str:
        """The reference with its scheme, by default ``docker://``."""
        return self.reference if "://" in self.reference else f"docker://{self.reference}"

    @property
    def fixed(self) -> bool:
        """Whether the reference always means the same image: it has a digest, or a tag other than latest."""
        name = self.url.partition("://")[2].rpartition("/")[2]
        tag = name.partition(":")[2]
        return "@" in name or tag not in {"", "latest"}

    @property
    def stem(self) -> str:
        """The image's file name without suffix: readable, and unique for each reference."""
        name = re.sub(r"[^A-Za-z0-9._]+", "-", self.url.partition("://")[2]).strip("-.")[:80]
        return f"{name}-{hashlib.sha256(self.url.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


class Runtime:
    """A container runtime. The defaults of this class add nothing to a job.

    Attributes:
        name: the value of ``container.runtime`` in a profile.
        program: the program that must be installed on the nodes, if any.
        preparation: the template of the lines that provide the image, or None.
        ending: the suffix of the files into which images are pulled, None for a runtime that stores images
            itself.
        optional_program: the program that pulls images if it is installed; otherwise each node pulls by
            itself.
    """

    name: ClassVar[str]
    program: ClassVar[str | None] = None
    preparation: ClassVar[str | None] = None
    ending: ClassVar[str | None] = None
    optional_program: ClassVar[str | None] = None

    def check(self, entry: ContainerOptions) -> list[str]:
        """Return every reason, one line each, why this runtime cannot run the job."""
        del entry
        return []

    def directives(self, entry: ContainerOptions) -> Mapping[str, str]:
        """Return the sbatch options that the runtime needs."""
        del entry
        return {}

    def srun_options(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the srun options that start the task inside the image."""
        del entry
        return ()

    def prefix(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the words that precede the task's command."""
        del entry
        return ()

    def values(self, entry: ContainerOptions) -> Mapping[str, object]:
        """Return the values for the preparation template."""
        return {"image": entry.reference}

    def pull(self, entry: ContainerOptions) -> tuple[str, ...]:
        """Return the command that pulls the image, without the arguments for the output file and `source`."""
        del entry
        return ()

    def source(self, entry: ContainerOptions) -> str:
        """Return the reference in the runtime's notation for a pull."""
        return entry.url

    def file(self, entry: ContainerOptions) -> str | None:
        """Return the file below `FOLDER` that all runs share, None for an image that is not in a file."""
        if self.ending is None or entry.is_file or not (entry.fixed or entry.offline):
            return None
        return f"{entry.stem}{self.ending}"

    def pulled(self, entry: ContainerOptions) -> dict[str, object] | None:
        """Return the values for the pull template, None if there is nothing to pull."""
        if self.ending is None or entry.is_file:
            return None
        source = self.source(entry)
        command = join((*self.pull(entry), RawShell('"$part"'), source))
        return {
            "command": RawShell(command),
            "file": self.file(entry),
            "ending": RawShell(self.ending),
            "source": source,
            "program": self.optional_program,
        }


FOLDER = ".images"  # of pulled images, below the run root


def mount_problems(mounts: tuple[str, ...]) -> list[str]:
    """Return a problem for each malformed mount."""
    return [
        f"--container-mount {mount!r}: write SRC, SRC:DST or SRC:DST:ro with absolute paths"
        for mount in mounts
        if not re.fullmatch(r"/[^:]*(?::/[^:]*(?::(?:ro|rw))?)?", mount)
    ]


def pairs(entry: ContainerOptions) -> list[str]:
    """Return the requested mounts as ``SRC:DST[:ro]``, after the working directory."""
    requested_pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in entry.mounts]
    return [f"{entry.work_dir}:{entry.work_dir}", *requested_pairs]
