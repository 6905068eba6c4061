"""Knows a cluster by its name: which of the profiles there are is that of this one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from dtslurm.model.cluster import ClusterProfile

NO_SITES = {"local", "slurm"}


def known_as(
    profiles: Mapping[str, ClusterProfile], cluster: str, hosts: Iterable[str], nodes: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return the profiles of this cluster, each with the name it was known by; the best evidence alone.

    What a profile says itself (``recognise``, ``login.host``) counts most, then Slurm's ClusterName, then a
    part of the login node's full name.

    Args:
        cluster: ClusterName of slurm.conf.
        hosts: names of the login node.
        nodes: names of compute nodes.
    """
    full = [host.lower() for host in hosts if host]
    named = [cluster.lower(), *full, *(node.lower() for node in nodes)]
    named = [name for name in dict.fromkeys(named) if name]
    labels = {plain(label): host for host in full for label in host.split(".")[:-1]}
    by_pattern, by_name, by_label = [], [], []
    for name, profile in profiles.items():
        if name in NO_SITES:
            continue
        seen = first(named, profile.recognise) or first(full, login_names(profile.login.host))
        if seen:
            by_pattern.append((name, seen))
        elif cluster and plain(name) == plain(cluster):
            by_name.append((name, f"ClusterName {cluster}"))
        elif plain(name) in labels:
            by_label.append((name, labels[plain(name)]))
    return by_pattern or by_name or by_label


def login_names(host: str | None) -> list[str]:
    """Return patterns of a site's login nodes: the documented name, and all below it.

    Below ``uni.edu``, of ``login.uni.edu``, are machines of many clusters.
    """
    if not host or "." not in host:
        return []
    domain = host.removeprefix("login.")
    return [host, f"*.{domain}"] if domain.count(".") > 1 else [host]


def plain(name: str) -> str:
    """Return a name without what people write differently."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def first(names: Sequence[str], patterns: Sequence[str]) -> str:
    """Return the first of the names that the first possible pattern fits, an empty word if none does."""
    for pattern in patterns:
        found = next((name for name in names if fnmatchcase(name, pattern.lower())), "")
        if found:
            return found
    return ""


def profile_name(cluster: str, host: str | None) -> str:
    """Return what a discovered profile may be called: as the cluster, else as the host."""
    words = re.sub(r"[^a-z0-9._-]+", "-", (cluster or (host or "").split(".")[0]).lower()).strip("-._")
    return words if words and words not in NO_SITES else "mycluster"
