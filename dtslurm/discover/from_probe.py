"""Converts the observations of a probe job on its node to facts for a profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.discover.facts import Confidence, DiscoveredCluster, Fact, join_names
from dtslurm.presentation.quantities import pluralize

Seen = Mapping[str, Any]

_KIND_BY_LINK_LAYER = {"InfiniBand": "infiniband", "Ethernet": "roce", "Slingshot": "slingshot"}
_SMALL_DISK_MIB = 20 * 1024
_LOW_NOFILE = 4096
_SLOW_IMPORT_S = 30


def facts_from_probe(name: str, observations: Seen, kind_of_gpus: int = 0) -> DiscoveredCluster:
    """Return the facts about a node type and about the cluster from one probe.

    Args:
        name: the node type's name in the profile.
        observations: the probe's observations.
        kind_of_gpus: how many GPUs such a node has according to Slurm.
    """
    node = str(observations.get("node") or "?")
    source = f"probe on {node}"
    facts = [
        *_gpu_facts(name, observations, source),
        *_disk_facts(name, observations, source),
        *_fabric_facts(name, observations, source),
        *_environment_facts(observations, source),
    ]
    remarks_by_section = {
        f"node_types.{name}": list(_node_remarks(observations)),
        "fabric": list(_fabric_remarks(observations)),
    }
    return DiscoveredCluster(
        tuple(facts),
        {key: lines for key, lines in remarks_by_section.items() if lines},
        tuple(_notices(name, observations, node, kind_of_gpus)),
    )


def _gpu_facts(name: str, observations: Seen, source: str) -> Iterator[Fact]:
    parent_keys, gpus = ("node_types", name), rows(observations, "gpus")
    if observations.get("numa_nodes"):
        yield Fact((*parent_keys, "numa_nodes"), int(observations["numa_nodes"]), f"{source}: /sys")
    if not gpus:
        return
    model = str(gpus[0].get("name") or "")
    if model:
        yield Fact((*parent_keys, "gpus", "model"), model.removeprefix("NVIDIA "), f"{source}: nvidia-smi")
    yield Fact((*parent_keys, "gpus", "vendor"), str(gpus[0]["vendor"]), source)
    memory = gpus[0].get("memory_mib")
    if memory:
        yield Fact(
            (*parent_keys, "gpus", "memory"),
            f"{memory}M",
            f"{source}: memory per GPU according to the driver",
        )
    links = observations.get("links") or {}
    if links.get("kind"):
        count = f" ({links['links']} links)" if links.get("links") else ""
        part = "" if links.get("all", True) else ", not between all pairs"
        confidence: Confidence = "likely" if links["kind"] == "nvswitch" else "sure"
        yield Fact(
            (*parent_keys, "intra_node", "kind"),
            str(links["kind"]),
            f"{source}: topology{count}{part}",
            confidence,
        )
    if links.get("gbs"):
        yield Fact(
            (*parent_keys, "intra_node", "bandwidth_gbs"),
            float(links["gbs"]),
            f"{source}: nvidia-smi nvlink -s",
        )


def local_disks(observations: Seen) -> list[Mapping[str, Any]]:
    """Return the folders on local disks of the node, the largest first."""
    local = [
        disk
        for disk in rows(observations, "disks")
        if not disk.get("shared") and disk.get("kind") not in {"tmpfs", "ramfs"}
    ]
    return sorted(local, key=lambda disk: -(disk.get("size_mib") or 0))


def _disk_facts(name: str, observations: Seen, source: str) -> Iterator[Fact]:
    disks = local_disks(observations)
    memory_disks = [
        disk
        for disk in rows(observations, "disks")
        if disk.get("kind") == "tmpfs" and disk.get("path") != "/dev/shm"  # noqa: S108
    ]
    parent_keys = ("node_types", name, "local_disk")
    if disks and (disks[0].get("size_mib") or 0) >= _SMALL_DISK_MIB:
        largest = disks[0]
        yield Fact(
            (*parent_keys, "path"),
            str(largest["path"]),
            f"{source}: {largest.get('kind') or 'a local file system'}",
            "likely",
        )
        yield Fact(
            (*parent_keys, "size"),
            f"{largest['size_mib']}M",
            f"{source}: df, {largest['free_mib'] // 1024:,} GiB were free",
        )
    elif memory_disks:
        path = str(memory_disks[0]["path"])
        yield Fact((*parent_keys, "path"), path, f"{source}: tmpfs", "likely")
        yield Fact((*parent_keys, "note"), "in memory: files there count towards the job's --mem", source)


def select_active_ports(observations: Seen) -> list[Mapping[str, Any]]:
    """Return the RDMA ports that are up.

    If there are InfiniBand ports, Ethernet ports are left out: they usually serve storage.
    """
    ports = [port for port in rows(observations, "hcas") if port.get("state", "ACTIVE") == "ACTIVE"]
    non_ethernet = [port for port in ports if port.get("layer") != "Ethernet"]
    return non_ethernet or ports


def fabric_kind(observations: Seen) -> tuple[str, Confidence] | None:
    """Return the kind of the network and the confidence, or None if there is no evidence."""
    ports = select_active_ports(observations)
    names = [str(port.get("name", "")) for port in ports]
    if any(re.match(r"efa|rdmap\d", name) for name in names):
        return "efa", "likely"
    if any(name.startswith(("hfi1", "opa")) for name in names):
        return "omnipath", "sure"
    interfaces = [str(interface.get("name", "")) for interface in rows(observations, "interfaces")]
    if any(name.startswith("cxi") for name in names) or any(name.startswith("hsn") for name in interfaces):
        return "slingshot", "sure"
    if ports:
        kind = _KIND_BY_LINK_LAYER.get(str(ports[0].get("layer")))
        return (kind, "sure") if kind else None
    return ("ethernet", "likely") if interfaces else None


def _fabric_facts(name: str, observations: Seen, source: str) -> Iterator[Fact]:
    ports, detected = select_active_ports(observations), fabric_kind(observations)
    rates = [port["rate_gbps"] for port in ports if port.get("rate_gbps")]
    if detected is None:
        return
    kind, confidence = detected
    adapters = join_names((str(port["name"]) for port in ports), 10) or "no RDMA adapter"
    yield Fact(("fabric", "kind"), kind, f"{source}: {adapters}", confidence)
    if rates:
        yield Fact(("fabric", "rate_gbps"), float(max(rates)), f"{source}: /sys/class/infiniband")
    interface = (observations.get("route") or {}).get("interface", "")
    if interface and interface != "lo":
        evidence = f"{source}: route to {(observations.get('route') or {}).get('peer')}"
        yield Fact(("fabric", "interfaces"), (str(interface),), evidence)
    template_by_kind = {
        "infiniband": "infiniband",
        "roce": "roce",
        "efa": "efa",
        "omnipath": "omnipath",
        "ethernet": "ethernet",
    }
    vendor = next((str(gpu.get("vendor")) for gpu in rows(observations, "gpus")), "nvidia")
    template = (
        f"slingshot-{'amd' if vendor == 'amd' else 'nvidia'}"
        if kind == "slingshot"
        else template_by_kind.get(kind)
    )
    if template:
        yield Fact(
            ("fabric", "environment_from"),
            template,
            f"defaults for {kind}, see templates/fabrics",
            "guess",
        )
    if ports:
        yield Fact(("fabric", "hcas"), tuple(str(port["name"]) for port in ports), f"{source}: active ports")
        yield Fact(("node_types", name, "nics", "count"), len(ports), source)
    if rates:
        yield Fact(("node_types", name, "nics", "rate_gbps"), float(max(rates)), source)


def _environment_facts(observations: Seen, source: str) -> Iterator[Fact]:
    online = observations.get("online") or {}
    if online:
        hosts = join_names(online)
        if any(online.values()):
            yield Fact(("environment", "offline"), False, f"{source}: {hosts} can be reached")
        elif not observations.get("proxy"):
            yield Fact(("environment", "offline"), True, f"{source}: {hosts} cannot be reached", "likely")
    runtimes = [
        name
        for name in _get_words(observations, "runtimes")
        if name in {"apptainer", "singularity", "shifter", "podman-hpc"}
    ]
    if runtimes:
        yield Fact(("container", "runtime"), runtimes[0], f"{source}: on its PATH")


def _node_remarks(observations: Seen) -> Iterator[str]:
    limits = observations.get("limits") or {}
    if limits:
        limit_texts = ", ".join(
            f"{name} {value if value == 'unlimited' else f'{value:,}'}" for name, value in limits.items()
        )
        yield f"limits in a job: {limit_texts}; /dev/shm {observations.get('shm_mib') or 0:,} MiB"
    torch = observations.get("torch") or {}
    if torch.get("version"):
        yield f"import torch {torch['version']}: {torch['seconds']} s with {torch['python']}"
    names_by_numa: dict[int, list[str]] = {}
    for device in (*rows(observations, "gpus"), *select_active_ports(observations)):
        if device.get("numa") is not None:
            names_by_numa.setdefault(int(device["numa"]), []).append(
                f"GPU {device['index']}" if "index" in device else str(device["name"])
            )
    for numa, names in sorted(names_by_numa.items()):
        yield f"NUMA node {numa}: {join_names(names, 20)}"
    if _get_words(observations, "runtimes"):
        yield f"container programs: {join_names(_get_words(observations, 'runtimes'))}"


def _fabric_remarks(observations: Seen) -> Iterator[str]:
    interfaces = [
        f"{interface['name']}" + (f" ({interface['mbps'] / 1000:g} Gb/s)" if interface.get("mbps") else "")
        for interface in rows(observations, "interfaces")
    ]
    if interfaces:
        yield f"interfaces of {observations.get('node')}: {join_names(interfaces, 12)}"


def _notices(name: str, observations: Seen, node: str, gpus: int) -> Iterator[str]:
    in_job = len(rows(observations, "gpus"))
    if gpus and in_job != gpus:
        note = (
            ""
            if in_job or observations.get("gpu_tools")
            else " (the node has neither nvidia-smi nor rocm-smi)"
        )
        yield (
            f"{node}: Slurm reports {pluralize(gpus, 'GPU')} for {name}, but the job saw "
            f"{in_job or 'none'}{note}"
        )
    limits = observations.get("limits") or {}
    if select_active_ports(observations) and limits.get("memlock") != "unlimited":
        yield (
            f"{node}: memlock is limited to {limits.get('memlock')} bytes in a job; RDMA needs unlimited "
            "memlock"
        )
    if isinstance(limits.get("nofile"), int) and limits["nofile"] < _LOW_NOFILE:
        yield f"{node}: only {limits['nofile']} open files are allowed for a process (nofile)"
    torch = observations.get("torch") or {}
    if torch.get("seconds") and torch["seconds"] > _SLOW_IMPORT_S:
        yield f"{node}: import torch takes {torch['seconds']:g} s; a container may be faster"
    if (observations.get("route") or {}).get("resolves") is False:
        yield f"{node}: this node cannot resolve the name of another node, only reach its address"


def rows(observations: Seen, key: str) -> list[Mapping[str, Any]]:
    """Return a list of records from a probe's observations, empty if the probe has none."""
    value = observations.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, Sequence) else []


def _get_words(observations: Seen, key: str) -> list[str]:
    value = observations.get(key)
    return [str(word) for word in value] if isinstance(value, list) else []
