"""Launchers by name."""

from __future__ import annotations

from collections.abc import Collection

from dtslurm import plugins
from dtslurm.launch.base import Launcher

GROUP = "dtslurm.launchers"


def names() -> list[str]:
    """Return the names of all launchers, without importing any."""
    return plugins.names(GROUP)


def own() -> Collection[str]:
    """Return the names of those that come with dtslurm."""
    return plugins.own(GROUP)


def load(name: str) -> Launcher:
    """Return the launcher of that name.

    Raises:
        RequestInvalid: there is none, or its package cannot be imported.
    """
    launcher: Launcher = plugins.load(GROUP, "launcher", name)
    return launcher
