"""Parts by name: our own from a table here, third parties' from their packages' entry points.

Reading entry points takes some 10 ms, most of it for the import of what reads them; so they are read only
for names that are not ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from dtslurm.errors import RequestInvalid
from dtslurm.suggestions import list_nearest, suggest_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# group -> name -> module:object
_OWN: Mapping[str, Mapping[str, str]] = {
    "dtslurm.launchers": {
        "single": "dtslurm.launch.single:launcher",
        "srun": "dtslurm.launch.srun:launcher",
        "torchrun": "dtslurm.launch.torchrun:launcher",
        "deepspeed": "dtslurm.launch.deepspeed:launcher",
        "accelerate": "dtslurm.launch.accelerate:launcher",
        "lightning": "dtslurm.launch.lightning:launcher",
        "llamafactory": "dtslurm.launch.llamafactory:launcher",
        "megatron": "dtslurm.launch.megatron:launcher",
        "torchtitan": "dtslurm.launch.torchtitan:launcher",
        "nvrx": "dtslurm.launch.nvrx:launcher",
        "horovod": "dtslurm.launch.horovod:launcher",
        "jax": "dtslurm.launch.jax:launcher",
        "mpi": "dtslurm.launch.mpi:launcher",
        "ray": "dtslurm.launch.ray:launcher",
        "tensorflow": "dtslurm.launch.tensorflow:launcher",
    },
    "dtslurm.containers": {
        "apptainer": "dtslurm.container.apptainer:runtime",
        "cscs-ce": "dtslurm.container.cscs_ce:runtime",
        "podman-hpc": "dtslurm.container.podman_hpc:runtime",
        "pyxis": "dtslurm.container.pyxis:runtime",
        "shifter": "dtslurm.container.shifter:runtime",
        "singularity": "dtslurm.container.apptainer:singularity",
    },
}


@cache
def _others(group: str) -> dict[str, EntryPoint]:
    """Return what other packages bring."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def own(group: str) -> Collection[str]:
    """Return the names of our own parts."""
    return _OWN[group]


def names(group: str) -> list[str]:
    """Return the names in a group, without importing anything."""
    return sorted({*own(group), *_others(group)})


def load(group: str, kind: str, name: str) -> Any:
    """Return the object of that name; ``kind`` is what people call it.

    Raises:
        RequestInvalid: there is none, or its package cannot be imported.
    """
    if name in own(group):
        module, _, attribute = _OWN[group][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    entry = _others(group).get(name)
    if entry is None:
        known = names(group)
        listed = list_nearest(name, known)
        raise RequestInvalid([f"unknown {kind} {name!r}{suggest_name(name, known)} (there are: {listed})"])
    try:
        return entry.load()
    except Exception as error:  # a third party's import may fail in any way
        origin = entry.dist.name if entry.dist else "?"
        raise RequestInvalid([f"{kind} {name!r} of package {origin} cannot be loaded: {error}"]) from error
