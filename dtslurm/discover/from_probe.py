"""Converts the observations of a probe job on its node to facts for a profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.discover.facts import DiscoveredCluster, Fact, Sure, listed
from dtslurm.model.units import pluralize

Seen = Mapping[str, Any]

_KIND_BY_LINK_LAYER = {"InfiniBand": "infiniband", "Ethernet": "roce", "Slingshot": "slingshot"}
_SMALL_DISK_MIB = 20 * 1024
_LOW_NOFILE = 4096
_SLOW_IMPORT_S = 30


def facts_from_probe(name: str, seen: Seen, kind_of_gpus: int = 0) -> DiscoveredCluster:
    """Return the facts about a node type and about the cluster from one probe.

    Args:
        name: the node type's name in the profile.
        seen: the probe's observations.
        kind_of_gpus: how many GPUs such a node has according to Slurm.
    """
    node = str(seen.get("node") or "?")
    source = f"probe on {node}"
    facts = [
        *_gpu_facts(name, seen, source),
        *_disk_facts(name, seen, source),
        *_fabric_facts(name, seen, source),
        *_environment_facts(seen, source),
    ]
    remarks = {f"node_types.{name}": list(_node_remarks(seen)), "fabric": list(_fabric_remarks(seen))}
    return DiscoveredCluster(
        tuple(facts),
        {key: lines for key, lines in remarks.items() if lines},
        tuple(_notices(name, seen, node, kind_of_gpus)),
    )


def _gpu_facts(name: str, seen: Seen, by: str) -> Iterator[Fact]:
    above, gpus = ("node_types", name), rows(seen, "gpus")
    if seen.get("numa_nodes"):
        yield Fact((*above, "numa_nodes"), int(seen["numa_nodes"]), f"{by}: /sys")
    if not gpus:
        return
    model = str(gpus[0].get("name") or "")
    if model:
        yield Fact((*above, "gpus", "model"), model.removeprefix("NVIDIA "), f"{by}: nvidia-smi")
    yield Fact((*above, "gpus", "vendor"), str(gpus[0]["vendor"]), by)
    memory = gpus[0].get("memory_mib")
    if memory:
        yield Fact((*above, "gpus", "memory"), f"{memory}M", f"{by}: memory per GPU according to the driver")
    links = seen.get("links") or {}
    if links.get("kind"):
        count = f" ({links['links']} links)" if links.get("links") else ""
        part = "" if links.get("all", True) else ", not between all pairs"
        sure: Sure = "likely" if links["kind"] == "nvswitch" else "sure"
        yield Fact((*above, "intra_node", "kind"), str(links["kind"]), f"{by}: topology{count}{part}", sure)
    if links.get("gbs"):
        yield Fact(
            (*above, "intra_node", "bandwidth_gbs"), float(links["gbs"]), f"{by}: nvidia-smi nvlink -s"
        )


def local_disks(seen: Seen) -> list[Mapping[str, Any]]:
    """Return the folders on local disks of the node, the largest first."""
    local = [
        disk
        for disk in rows(seen, "disks")
        if not disk.get("shared") and disk.get("kind") not in {"tmpfs", "ramfs"}
    ]
    return sorted(local, key=lambda one: -(one.get("size_mib") or 0))


def _disk_facts(name: str, seen: Seen, by: str) -> Iterator[Fact]:
    disks = local_disks(seen)
    memory_disks = [
        disk
        for disk in rows(seen, "disks")
        if disk.get("kind") == "tmpfs" and disk.get("path") != "/dev/shm"  # noqa: S108
    ]
    above = ("node_types", name, "local_disk")
    if disks and (disks[0].get("size_mib") or 0) >= _SMALL_DISK_MIB:
        largest = disks[0]
        yield Fact(
            (*above, "path"),
            str(largest["path"]),
            f"{by}: {largest.get('kind') or 'a local file system'}",
            "likely",
        )
        yield Fact(
            (*above, "size"),
            f"{largest['size_mib']}M",
            f"{by}: df, {largest['free_mib'] // 1024:,} GiB were free",
        )
    elif memory_disks:
        path = str(memory_disks[0]["path"])
        yield Fact((*above, "path"), path, f"{by}: tmpfs", "likely")
        yield Fact((*above, "note"), "in memory: files there count towards the job's --mem", by)


def active(seen: Seen) -> list[Mapping[str, Any]]:
    """Return the RDMA ports that are up.

    If there are InfiniBand ports, Ethernet ports are left out: they usually serve storage.
    """
    ports = [port for port in rows(seen, "hcas") if port.get("state", "ACTIVE") == "ACTIVE"]
    non_ethernet = [port for port in ports if port.get("layer") != "Ethernet"]
    return non_ethernet or ports


def fabric_kind(seen: Seen) -> tuple[str, Sure] | None:
    """Return the kind of the network and the confidence, or None if there is no evidence."""
    ports = active(seen)
    names = [str(port.get("name", "")) for port in ports]
    if any(re.match(r"efa|rdmap\d", name) for name in names):
        return "efa", "likely"
    if any(name.startswith(("hfi1", "opa")) for name in names):
        return "omnipath", "sure"
    interfaces = [str(interface.get("name", "")) for interface in rows(seen, "interfaces")]
    if any(name.startswith("cxi") for name in names) or any(name.startswith("hsn") for name in interfaces):
        return "slingshot", "sure"
    if ports:
        kind = _KIND_BY_LINK_LAYER.get(str(ports[0].get("layer")))
        return (kind, "sure") if kind else None
    return ("ethernet", "likely") if interfaces else None


def _fabric_facts(name: str, seen: Seen, by: str) -> Iterator[Fact]:
    ports, detected = active(seen), fabric_kind(seen)
    rates = [port["rate_gbps"] for port in ports if port.get("rate_gbps")]
    if detected is None:
        return
    kind, sure = detected
    adapters = listed((str(port["name"]) for port in ports), 10) or "no RDMA adapter"
    yield Fact(("fabric", "kind"), kind, f"{by}: {adapters}", sure)
    if rates:
        yield Fact(("fabric", "rate_gbps"), float(max(rates)), f"{by}: /sys/class/infiniband")
    interface = (seen.get("route") or {}).get("interface", "")
    if interface and interface != "lo":
        evidence = f"{by}: route to {(seen.get('route') or {}).get('peer')}"
        yield Fact(("fabric", "interfaces"), (str(interface),), evidence)
    template_by_kind = {
        "infiniband": "infiniband",
        "roce": "roce",
        "efa": "efa",
        "omnipath": "omnipath",
        "ethernet": "ethernet",
    }
    vendor = next((str(gpu.get("vendor")) for gpu in rows(seen, "gpus")), "nvidia")
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
        yield Fact(("fabric", "hcas"), tuple(str(port["name"]) for port in ports), f"{by}: active ports")
        yield Fact(("node_types", name, "nics", "count"), len(ports), by)
    if rates:
        yield Fact(("node_types", name, "nics", "rate_gbps"), float(max(rates)), by)


def _environment_facts(seen: Seen, by: str) -> Iterator[Fact]:
    online = seen.get("online") or {}
    if online:
        hosts = listed(online)
        if any(online.values()):
            yield Fact(("environment", "offline"), False, f"{by}: {hosts} can be reached")
        elif not seen.get("proxy"):
            yield Fact(("environment", "offline"), True, f"{by}: {hosts} cannot be reached", "likely")
    runtimes = [
        name
        for name in _get_words(seen, "runtimes")
        if name in {"apptainer", "singularity", "shifter", "podman-hpc"}
    ]
    if runtimes:
        yield Fact(("container", "runtime"), runtimes[0], f"{by}: on its PATH")


def _node_remarks(seen: Seen) -> Iterator[str]:
    limits = seen.get("limits") or {}
    if limits:
        limit_texts = ", ".join(
            f"{name} {value if value == 'unlimited' else f'{value:,}'}" for name, value in limits.items()
        )
        yield f"limits in a job: {limit_texts}; /dev/shm {seen.get('shm_mib') or 0:,} MiB"
    torch = seen.get("torch") or {}
    if torch.get("version"):
        yield f"import torch {torch['version']}: {torch['seconds']} s with {torch['python']}"
    names_by_numa: dict[int, list[str]] = {}
    for device in (*rows(seen, "gpus"), *active(seen)):
        if device.get("numa") is not None:
            names_by_numa.setdefault(int(device["numa"]), []).append(
                f"GPU {device['index']}" if "index" in device else str(device["name"])
            )
    for numa, names in sorted(names_by_numa.items()):
        yield f"NUMA node {numa}: {listed(names, 20)}"
    if _get_words(seen, "runtimes"):
        yield f"container programs: {listed(_get_words(seen, 'runtimes'))}"


def _fabric_remarks(seen: Seen) -> Iterator[str]:
    interfaces = [
        f"{interface['name']}" + (f" ({interface['mbps'] / 1000:g} Gb/s)" if interface.get("mbps") else "")
        for interface in rows(seen, "interfaces")
    ]
    if interfaces:
        yield f"interfaces of {seen.get('node')}: {listed(interfaces, 12)}"


def _notices(name: str, seen: Seen, node: str, gpus: int) -> Iterator[str]:
    in_job = len(rows(seen, "gpus"))
    if gpus and in_job != gpus:
        note = "" if in_job or seen.get("gpu_tools") else " (the node has neither nvidia-smi nor rocm-smi)"
        yield (
            f"{node}: Slurm reports {pluralize(gpus, 'GPU')} for {name}, but the job saw "
            f"{in_job or 'none'}{note}"
        )
    limits = seen.get("limits") or {}
    if active(seen) and limits.get("memlock") != "unlimited":
        yield (
            f"{node}: memlock is limited to {limits.get('memlock')} bytes in a job; RDMA needs unlimited "
            "memlock"
        )
    if isinstance(limits.get("nofile"), int) and limits["nofile"] < _LOW_NOFILE:
        yield f"{node}: only {limits['nofile']} open files are allowed for a process (nofile)"
    torch = seen.get("torch") or {}
    if torch.get("seconds") and torch["seconds"] > _SLOW_IMPORT_S:
        yield f"{node}: import torch takes {torch['seconds']:g} s; a container may be faster"
    if (seen.get("route") or {}).get("resolves") is False:
        yield f"{node}: this node cannot resolve the name of another node, only reach its address"


def rows(seen: Seen, key: str) -> list[Mapping[str, Any]]:
    """Return a list of records from a probe's observations, empty if the probe has none."""
    value = seen.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, Sequence) else []


def _get_words(seen: Seen, key: str) -> list[str]:
    value = seen.get(key)
    return [str(word) for word in value] if isinstance(value, list) else []
