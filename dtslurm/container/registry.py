"""Registry of container runtimes by name."""

from __future__ import annotations

from dtslurm import plugins
from dtslurm.container.base import Runtime

GROUP = "dtslurm.containers"


def load(name: str) -> Runtime:
    """Return the container runtime of that name.

    Raises:
        RequestInvalid: no runtime has this name, or its package cannot be imported.
    """
    runtime: Runtime = plugins.load(GROUP, "container runtime", name)
    return runtime
