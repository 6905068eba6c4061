"""What a container runtime is: the words that put a task into an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a job wants of its container.

    Attributes:
        image: a file, or a reference such as ``nvcr.io/nvidia/pytorch:25.01-py3``.
        mounts: ``SRC[:DST[:ro]]``, beside the run directory and the working directory.
        variables: names of the variables the script sets, which must win over the image's own.
        vendor_script: whether a fabric's own script sets variables of NCCL beside those.
        options: the site's own options for the runtime.
        gpu_vendor: None where no GPU is asked for.
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

    @property
    def is_file(self) -> bool:
        """Whether the image is a file on the cluster rather than a reference into a registry."""
        return self.image.startswith(("/", "./", "../", "~")) or self.image.endswith(
            (".sif", ".sqsh", ".toml")
        )


class Runtime:
    """A container runtime; as it stands, a program that runs the task's command.

    Attributes:
        name: what a profile writes as ``container.runtime``.
        program: the program that must be there on the nodes, if any.
        preparation: template of the lines that bring the image, or None.
    """

    name: ClassVar[str]
    program: ClassVar[str | None] = None
    preparation: ClassVar[str | None] = None

    def check(self, entry: Entry) -> list[str]:
        """Return every reason, one line each, why this runtime cannot run the job."""
        del entry
        return []

    def directives(self, entry: Entry) -> Mapping[str, str]:
        """Return sbatch options the runtime needs."""
        del entry
        return {}

    def srun_options(self, entry: Entry) -> tuple[str, ...]:
        """Return srun options that start the task inside the image."""
        del entry
        return ()

    def prefix(self, entry: Entry) -> tuple[str, ...]:
        """Return the words before the task's command."""
        del entry
        return ()

    def values(self, entry: Entry) -> Mapping[str, object]:
        """Return what the preparation template needs."""
        return {"image": entry.image}


def mount_problems(mounts: tuple[str, ...]) -> list[str]:
    """Return which mounts are malformed."""
    return [
        f"--container-mount {mount!r}: write SRC, SRC:DST or SRC:DST:ro with absolute paths"
        for mount in mounts
        if not re.fullmatch(r"/[^:]*(?::/[^:]*(?::(?:ro|rw))?)?", mount)
    ]


def pairs(entry: Entry) -> list[str]:
    """Return the mounts asked for as ``SRC:DST[:ro]``, and the working directory."""
    asked = [mount if ":" in mount else f"{mount}:{mount}" for mount in entry.mounts]
    return [f"{entry.work_dir}:{entry.work_dir}", *asked]
