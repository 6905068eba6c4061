"""Find the cluster profiles that describe a given cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from dtslurm.model.cluster import ClusterProfile

NO_SITES = {"local", "slurm"}


def find_matching_profiles(
    profiles: Mapping[str, ClusterProfile], cluster: str, hosts: Iterable[str], nodes: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return (profile name, matched evidence) for the profiles that match this cluster.

    Only matches by the strongest kind of evidence are returned: first the profile's own patterns
    (``recognise``, ``login.host``), then Slurm's ClusterName, then a part of the login node's full name.

    Args:
        profiles: the profiles by name.
        cluster: ClusterName of slurm.conf.
        hosts: names of the login node.
        nodes: names of compute nodes.
    """
    host_names = [host.lower() for host in hosts if host]
    all_names = [cluster.lower(), *host_names, *(node.lower() for node in nodes)]
    all_names = [name for name in dict.fromkeys(all_names) if name]
    # A label is a part of a host's name between dots; the top-level domain is left out.
    host_by_label = {plain(label): host for host in host_names for label in host.split(".")[:-1]}
    by_pattern, by_name, by_label = [], [], []
    for name, profile in profiles.items():
        if name in NO_SITES:
            continue
        matched_name = first(all_names, profile.recognise) or first(
            host_names, login_names(profile.login.host)
        )
        if matched_name:
            by_pattern.append((name, matched_name))
        elif cluster and plain(name) == plain(cluster):
            by_name.append((name, f"ClusterName {cluster}"))
        elif plain(name) in host_by_label:
            by_label.append((name, host_by_label[plain(name)]))
    return by_pattern or by_name or by_label


def login_names(host: str | None) -> list[str]:
    """Return patterns of a cluster's login nodes: the documented name, and all names below it.

    ``uni.edu``, the parent domain of ``login.uni.edu``, has hosts of many clusters, so it gives no pattern.
    """
    if not host or "." not in host:
        return []
    domain = host.removeprefix("login.")
    return [host, f"*.{domain}"] if domain.count(".") > 1 else [host]


def plain(name: str) -> str:
    """Return a name in lower case without characters other than a-z and 0-9, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def first(names: Sequence[str], patterns: Sequence[str]) -> str:
    """Return the first name that matches a pattern, trying the patterns in order, or "" if none does."""
    for pattern in patterns:
        match = next((name for name in names if fnmatchcase(name, pattern.lower())), "")
        if match:
            return match
    return ""


def profile_name(cluster: str, host: str | None) -> str:
    """Return a name for a discovered profile: the cluster's name, or else the host's."""
    name = re.sub(r"[^a-z0-9._-]+", "-", (cluster or (host or "").split(".")[0]).lower()).strip("-._")
    return name if name and name not in NO_SITES else "mycluster"
