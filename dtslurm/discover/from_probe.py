"""What a probe job saw on its node, as values of a profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.discover.facts import DiscoveredCluster, Fact, Sure, listed
from dtslurm.model.units import pluralize

Seen = Mapping[str, Any]

_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce", "Slingshot": "slingshot"}
_SMALL_DISK_MIB = 20 * 1024
_LOW_FILES = 4096
_SLOW_IMPORT_S = 30


def found(name: str, seen: Seen, kind_of_gpus: int = 0) -> DiscoveredCluster:
    """Return what one probe tells of a node type, and of the cluster.

    Args:
        name: the node type's name in the profile.
        kind_of_gpus: how many GPUs Slurm says such a node has.
    """
    node = str(seen.get("node") or "?")
    by = f"probe on {node}"
    facts = [*_gpus(name, seen, by), *_disk(name, seen, by), *_fabric(name, seen, by), *_around(seen, by)]
    remarks = {f"node_types.{name}": list(_node_remarks(seen)), "fabric": list(_fabric_remarks(seen))}
    return DiscoveredCluster(
        tuple(facts),
        {key: lines for key, lines in remarks.items() if lines},
        tuple(_notices(name, seen, node, kind_of_gpus)),
    )


def _gpus(name: str, seen: Seen, by: str) -> Iterator[Fact]:
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
        yield Fact((*above, "gpus", "memory"), f"{memory}M", f"{by}: what the driver shows of each")
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
    """Return the folders on disks of the node itself, the largest first."""
    local = [
        one
        for one in rows(seen, "disks")
        if not one.get("shared") and one.get("kind") not in {"tmpfs", "ramfs"}
    ]
    return sorted(local, key=lambda one: -(one.get("size_mib") or 0))


def _disk(name: str, seen: Seen, by: str) -> Iterator[Fact]:
    disks = local_disks(seen)
    memory = [
        one
        for one in rows(seen, "disks")
        if one.get("kind") == "tmpfs" and one.get("path") != "/dev/shm"  # noqa: S108
    ]
    above = ("node_types", name, "local_disk")
    if disks and (disks[0].get("size_mib") or 0) >= _SMALL_DISK_MIB:
        best = disks[0]
        yield Fact(
            (*above, "path"),
            str(best["path"]),
            f"{by}: {best.get('kind') or 'a local file system'}",
            "likely",
        )
        yield Fact(
            (*above, "size"), f"{best['size_mib']}M", f"{by}: df, {best['free_mib'] // 1024:,} GiB were free"
        )
    elif memory:
        path = str(memory[0]["path"])
        yield Fact((*above, "path"), path, f"{by}: tmpfs", "likely")
        yield Fact((*above, "note"), "in memory: what is written there counts against the job's --mem", by)


def active(seen: Seen) -> list[Mapping[str, Any]]:
    """Return the RDMA ports that are up; beside InfiniBand, Ethernet ones (storage's) are left out."""
    ports = [one for one in rows(seen, "hcas") if one.get("state", "ACTIVE") == "ACTIVE"]
    proper = [one for one in ports if one.get("layer") != "Ethernet"]
    return proper or ports


def fabric_kind(seen: Seen) -> tuple[str, Sure] | None:
    """Return the kind of network, and how sure that is; None where nothing tells."""
    ports = active(seen)
    names = [str(one.get("name", "")) for one in ports]
    if any(re.match(r"efa|rdmap\d", name) for name in names):
        return "efa", "likely"
    if any(name.startswith(("hfi1", "opa")) for name in names):
        return "omnipath", "sure"
    interfaces = [str(one.get("name", "")) for one in rows(seen, "interfaces")]
    if any(name.startswith("cxi") for name in names) or any(name.startswith("hsn") for name in interfaces):
        return "slingshot", "sure"
    if ports:
        kind = _LAYERS.get(str(ports[0].get("layer")))
        return (kind, "sure") if kind else None
    return ("ethernet", "likely") if interfaces else None


def _fabric(name: str, seen: Seen, by: str) -> Iterator[Fact]:
    ports, told = active(seen), fabric_kind(seen)
    rates = [one["rate_gbps"] for one in ports if one.get("rate_gbps")]
    if told is None:
        return
    kind, sure = told
    adapters = listed((str(one["name"]) for one in ports), 10) or "no RDMA adapter"
    yield Fact(("fabric", "kind"), kind, f"{by}: {adapters}", sure)
    if rates:
        yield Fact(("fabric", "rate_gbps"), float(max(rates)), f"{by}: /sys/class/infiniband")
    interface = (seen.get("route") or {}).get("interface", "")
    if interface and interface != "lo":
        evidence = f"{by}: the way to {(seen.get('route') or {}).get('peer')}"
        yield Fact(("fabric", "interfaces"), (str(interface),), evidence)
    environment = {
        "infiniband": "infiniband",
        "roce": "roce",
        "efa": "efa",
        "omnipath": "omnipath",
        "ethernet": "ethernet",
    }
    vendor = next((str(one.get("vendor")) for one in rows(seen, "gpus")), "nvidia")
    file = (
        f"slingshot-{'amd' if vendor == 'amd' else 'nvidia'}"
        if kind == "slingshot"
        else environment.get(kind)
    )
    if file:
        yield Fact(
            ("fabric", "environment_from"),
            file,
            f"what is known of {kind}; look at templates/fabrics",
            "guess",
        )
    if ports:
        yield Fact(
            ("fabric", "hcas"), tuple(str(one["name"]) for one in ports), f"{by}: the ports that are up"
        )
        yield Fact(("node_types", name, "nics", "count"), len(ports), by)
    if rates:
        yield Fact(("node_types", name, "nics", "rate_gbps"), float(max(rates)), by)


def _around(seen: Seen, by: str) -> Iterator[Fact]:
    online = seen.get("online") or {}
    if online:
        hosts = listed(online)
        if any(online.values()):
            yield Fact(("environment", "offline"), False, f"{by}: {hosts} could be reached")
        elif not seen.get("proxy"):
            yield Fact(("environment", "offline"), True, f"{by}: {hosts} could not be reached", "likely")
    runtimes = [
        name
        for name in _list_of_words(seen, "runtimes")
        if name in {"apptainer", "singularity", "shifter", "podman-hpc"}
    ]
    if runtimes:
        yield Fact(("container", "runtime"), runtimes[0], f"{by}: on its PATH")


def _node_remarks(seen: Seen) -> Iterator[str]:
    limits = seen.get("limits") or {}
    if limits:
        words = ", ".join(
            f"{name} {value if value == 'unlimited' else f'{value:,}'}" for name, value in limits.items()
        )
        yield f"limits in a job: {words}; /dev/shm {seen.get('shm_mib') or 0:,} MiB"
    torch = seen.get("torch") or {}
    if torch.get("version"):
        yield f"import torch {torch['version']}: {torch['seconds']} s by {torch['python']}"
    near: dict[int, list[str]] = {}
    for one in (*rows(seen, "gpus"), *active(seen)):
        if one.get("numa") is not None:
            near.setdefault(int(one["numa"]), []).append(
                f"GPU {one['index']}" if "index" in one else str(one["name"])
            )
    for numa, names in sorted(near.items()):
        yield f"NUMA node {numa}: {listed(names, 20)}"
    if _list_of_words(seen, "runtimes"):
        yield f"container programs: {listed(_list_of_words(seen, 'runtimes'))}"


def _fabric_remarks(seen: Seen) -> Iterator[str]:
    interfaces = [
        f"{one['name']}" + (f" ({one['mbps'] / 1000:g} Gb/s)" if one.get("mbps") else "")
        for one in rows(seen, "interfaces")
    ]
    if interfaces:
        yield f"interfaces of {seen.get('node')}: {listed(interfaces, 12)}"


def _notices(name: str, seen: Seen, node: str, gpus: int) -> Iterator[str]:
    here = len(rows(seen, "gpus"))
    if gpus and here != gpus:
        blind = "" if here or seen.get("gpu_tools") else " (there is no nvidia-smi nor rocm-smi there)"
        yield f"{node}: Slurm says {pluralize(gpus, 'GPU')} for {name}, the job saw {here or 'none'}{blind}"
    limits = seen.get("limits") or {}
    if active(seen) and limits.get("memlock") != "unlimited":
        yield f"{node}: memlock is limited to {limits.get('memlock')} bytes in a job; RDMA needs it unlimited"
    if isinstance(limits.get("nofile"), int) and limits["nofile"] < _LOW_FILES:
        yield f"{node}: only {limits['nofile']} open files for a process (nofile)"
    torch = seen.get("torch") or {}
    if torch.get("seconds") and torch["seconds"] > _SLOW_IMPORT_S:
        yield f"{node}: import torch takes {torch['seconds']:g} s; a container may be faster"
    if (seen.get("route") or {}).get("resolves") is False:
        yield f"{node}: the name of another node does not resolve there; only its address does"


def rows(seen: Seen, key: str) -> list[Mapping[str, Any]]:
    """Return a list of records that a probe told, empty where it did not."""
    value = seen.get(key)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, Sequence) else []


def _list_of_words(seen: Seen, key: str) -> list[str]:
    value = seen.get(key)
    return [str(one) for one in value] if isinstance(value, list) else []
