"""Registry of launchers by name."""

from __future__ import annotations

from collections.abc import Collection

from dtslurm import plugins
from dtslurm.launch.base import Launcher

GROUP = "dtslurm.launchers"


def names() -> list[str]:
    """Return the names of all launchers, without importing any."""
    return plugins.names(GROUP)


def own() -> Collection[str]:
    """Return the names of the launchers that are part of dtslurm."""
    return plugins.own(GROUP)


def load(name: str) -> Launcher:
    """Return the launcher of that name.

    Raises:
        RequestInvalid: no launcher has this name, or its package cannot be imported.
    """
    launcher: Launcher = plugins.load(GROUP, "launcher", name)
    return launcher
