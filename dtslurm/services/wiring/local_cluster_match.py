"""Tells whether the Slurm on this machine is that of a cluster whose profile names a login node.

A login node of one cluster must not take another cluster's jobs. What is looked at costs Slurm nothing: the
profile's own words, ClusterName in ``slurm.conf``, this machine's names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtslurm.discover.sites import NO_SITES, first, login_names, plain
from dtslurm.model.access import Access
from dtslurm.services.wiring.slurm_conf import cluster_name

_NO_NAMES = {*NO_SITES, "cluster", "linux"}  # Slurm's examples call a cluster so, and many sites left it
_NO_LABELS = {*_NO_NAMES, "login", "hpc", "ssh"}


def match_reason(
    access: Access, origins: Mapping[str, str], env: Mapping[str, str], real_name: Callable[[], str]
) -> str:
    """Return what tells that the Slurm on this machine is this cluster's; an empty word if nothing does.

    Args:
        origins: where the profile's values came from.
        real_name: tells the host that the user's SSH configuration means by ``login.host``.
    """
    cluster, host = cluster_name(env), access.host or ""
    here: list[str] = []
    for name in _own_names():
        here.append(name)
        if seen := _by_profile(access, origins, cluster, here) or _by_host(host, cluster, here):
            return seen
    real = real_name()
    if "." not in real and cluster and plain(cluster) in _plain({*_files(origins).values()}):
        return f"ClusterName {cluster}"  # of a profile that it extends, by an alias that tells of no other
    return _by_host(real, cluster, here)


def _by_profile(access: Access, origins: Mapping[str, str], cluster: str, here: list[str]) -> str:
    """Look at what the profile itself says, and at what it has from the profile that names the login node.

    Another profile that it extends may be of another cluster, as ``narval`` is for ``fir``.
    """
    files = _files(origins)
    own = {access.name, files.get("login.host", "")}
    if files.get("recognise", access.name) in own:
        seen = first([name for name in (cluster.lower(), *here) if name], access.recognise)
        if seen:
            return f"{seen}, which the profile recognises"
    if cluster and plain(cluster) in _plain(own):
        return f"ClusterName {cluster}"
    labels = {plain(label) for name in here for label in name.split(".")[:-1]}
    if not cluster and labels & _plain(own):
        return f"this machine's name {here[-1]}"
    return ""


def _by_host(host: str, cluster: str, here: list[str]) -> str:
    """Compare a login node's name with this machine's, and with the name of its Slurm."""
    if seen := first(here, [host, *login_names(host)]):
        return f"this machine's name {seen}"
    labels = {plain(label) for label in host.split(".")[:-2]} - _NO_LABELS
    return f"ClusterName {cluster}" if cluster and plain(cluster) in labels else ""


def _files(origins: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the profile that each value is from, by the value's dotted key."""
    return {key: Path(place.rpartition(":")[0] or place).stem for key, place in origins.items()}


def _plain(names: set[str]) -> set[str]:
    return {plain(name) for name in names} - _NO_NAMES - {""}


def _own_names() -> Iterator[str]:
    """Yield the names of this machine in lower case, the full one last: its domain may be far to ask."""
    name = os.uname().nodename.lower()
    yield name
    full = name if "." in name else socket.getfqdn(name).lower()
    if full != name and not full.startswith("localhost"):
        yield full
