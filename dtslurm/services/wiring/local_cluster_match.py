"""Decides whether the Slurm on this machine belongs to a cluster whose profile names a login node.

A login node of one cluster must not take another cluster's jobs. None of the evidence needs a request to
Slurm: the profile's values, ClusterName in ``slurm.conf``, and this machine's host names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtslurm.discover.sites import NO_SITES, first, login_names, plain
from dtslurm.model.access import Access
from dtslurm.services.wiring.slurm_conf import cluster_name

# ClusterName in Slurm's example files, which many sites keep, identifies no cluster.
_GENERIC_NAMES = {*NO_SITES, "cluster", "linux"}
_GENERIC_LABELS = {*_GENERIC_NAMES, "login", "hpc", "ssh"}


def match_reason(
    access: Access, origins: Mapping[str, str], env: Mapping[str, str], real_name: Callable[[], str]
) -> str:
    """Return the evidence that this machine's Slurm belongs to the cluster; an empty string if there is none.

    Args:
        access: how the cluster is reached according to the profile.
        origins: the file that each value of the profile comes from, by the value's dotted key.
        env: the environment, which may name ``slurm.conf``.
        real_name: returns the host name that the user's SSH configuration gives for ``login.host``.
    """
    cluster, host = cluster_name(env), access.host or ""
    host_names: list[str] = []
    for name in _iter_host_names():
        host_names.append(name)
        if reason := _match_profile(access, origins, cluster, host_names) or _match_host(
            host, cluster, host_names
        ):
            return reason
    ssh_host = real_name()
    if (
        "." not in ssh_host
        and cluster
        and plain(cluster) in _comparable({*_profiles_by_key(origins).values()})
    ):
        # A host without a domain cannot name another cluster, so any profile that this one extends may match.
        return f"ClusterName {cluster}"
    return _match_host(ssh_host, cluster, host_names)


def _match_profile(access: Access, origins: Mapping[str, str], cluster: str, host_names: list[str]) -> str:
    """Return evidence from the profile's values, and from the profile that sets its login node.

    Other profiles that it extends may describe another cluster, as ``narval`` does for ``fir``.
    """
    files = _profiles_by_key(origins)
    profile_names = {access.name, files.get("login.host", "")}
    if files.get("recognise", access.name) in profile_names:
        match = first([name for name in (cluster.lower(), *host_names) if name], access.recognise)
        if match:
            return f"{match}, which the profile recognizes"
    if cluster and plain(cluster) in _comparable(profile_names):
        return f"ClusterName {cluster}"
    labels = {plain(label) for name in host_names for label in name.split(".")[:-1]}
    if not cluster and labels & _comparable(profile_names):
        return f"this machine's name {host_names[-1]}"
    return ""


def _match_host(host: str, cluster: str, host_names: list[str]) -> str:
    """Return evidence from a login node's name: it fits this machine's host names or ClusterName."""
    if match := first(host_names, [host, *login_names(host)]):
        return f"this machine's name {match}"
    labels = {plain(label) for label in host.split(".")[:-2]} - _GENERIC_LABELS
    return f"ClusterName {cluster}" if cluster and plain(cluster) in labels else ""


def _profiles_by_key(origins: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the profile that each value comes from, by the value's dotted key."""
    return {key: Path(origin.rpartition(":")[0] or origin).stem for key, origin in origins.items()}


def _comparable(names: set[str]) -> set[str]:
    return {plain(name) for name in names} - _GENERIC_NAMES - {""}


def _iter_host_names() -> Iterator[str]:
    """Yield this machine's host names in lower case. The full one is last: it may take a slow DNS lookup."""
    name = os.uname().nodename.lower()
    yield name
    full_name = name if "." in name else socket.getfqdn(name).lower()
    if full_name != name and not full_name.startswith("localhost"):
        yield full_name
