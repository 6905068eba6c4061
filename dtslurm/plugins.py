"""Plugins by name: dtslurm's own from a table in this module, others from entry points of their packages.

Reading entry points takes about 10 ms, most of it for imports. They are read only for names that are not in
the table.
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
_BUILT_IN: Mapping[str, Mapping[str, str]] = {
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
def _load_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of other packages in a group, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def own(group: str) -> Collection[str]:
    """Return the names of dtslurm's own plugins in a group."""
    return _BUILT_IN[group]


def names(group: str) -> list[str]:
    """Return all names in a group, without importing the plugins."""
    return sorted({*own(group), *_load_entry_points(group)})


def load(group: str, kind: str, name: str) -> Any:
    """Return the plugin of that name; ``kind`` describes it in messages.

    Raises:
        RequestInvalid: there is none, or its package cannot be imported.
    """
    if name in own(group):
        module, _, attribute = _BUILT_IN[group][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    entry = _load_entry_points(group).get(name)
    if entry is None:
        known_names = names(group)
        nearest = list_nearest(name, known_names)
        raise RequestInvalid(
            [f"unknown {kind} {name!r}{suggest_name(name, known_names)} (available: {nearest})"]
        )
    try:
        return entry.load()
    except Exception as error:  # an import of another package may fail in any way
        origin = entry.dist.name if entry.dist else "?"
        raise RequestInvalid([f"{kind} {name!r} of package {origin} cannot be loaded: {error}"]) from error
