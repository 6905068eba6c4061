"""Completes a profile with what a live Slurm tells of itself. Pure; what the profile says wins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtslurm.model.cluster import ClusterProfile, GpuRequest, Gpus, NodeType, Partition
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo

_VENDORS = (
    ("amd", re.compile(r"mi\d{2,3}|amd|instinct|radeon|gfx\d", re.IGNORECASE)),
    ("intel", re.compile(r"intel|pvc|ponte|gaudi", re.IGNORECASE)),
)
_SLICE = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)


def complete(
    profile: ClusterProfile,
    partitions: Sequence[PartitionInfo],
    nodes: Sequence[NodeInfo],
    config: Mapping[str, str],
) -> ClusterProfile:
    """Return ``profile`` with partitions, node types and customs filled in where it has none."""
    types, type_of = node_types(nodes)
    default = next((partition.name for partition in partitions if partition.default), None)
    only_type = {partition.name: _only_type(partition.name, nodes, type_of) for partition in partitions}
    customs = profile.slurm
    own_types, usual = bool(profile.node_types), profile.node_type(None)
    if not customs.partitions:
        customs = replace(
            customs,
            partitions={
                partition.name: Partition(
                    max_time=partition.max_time,
                    max_nodes=_least(partition.max_nodes, partition.total_nodes),
                    node_type=None if own_types else only_type[partition.name],
                )
                for partition in partitions
            },
        )
    customs = replace(
        customs,
        partition=customs.partition or (usual.partition if usual else None) or default,
        gpu_request=_gpu_request(customs.gpu_request, config),
        requeue_exit_codes=customs.requeue_exit_codes or _codes(config.get("RequeueExit", "")),
        max_array_size=customs.max_array_size or _number(config.get("MaxArraySize", "")),
    )
    if own_types:
        return replace(profile, slurm=customs)
    return replace(profile, slurm=customs, node_types=types)


def node_types(nodes: Sequence[NodeInfo]) -> tuple[dict[str, NodeType], dict[str, str]]:
    """Group nodes of the same make; return the types by name and each node's type.

    Types are named ``gpu-a100x8`` or ``cpu-64``, with the memory added where that leaves two alike.
    """
    kinds = Counter(_kind(node) for node in nodes)
    plain = Counter(_plain_name(kind) for kind in kinds)
    names: dict[NodeType, str] = {}
    for kind, _ in kinds.most_common():
        name = _plain_name(kind)
        if plain[name] > 1 and kind.memory:
            name = f"{name}-{kind.memory}"
        number, base = 1, name
        while name in names.values():
            number += 1
            name = f"{base}-{number}"
        names[kind] = name
    return {name: kind for kind, name in names.items()}, {node.name: names[_kind(node)] for node in nodes}


def _kind(node: NodeInfo) -> NodeType:
    return NodeType(
        gpus=_gpus(node),
        sockets=node.sockets,
        cores_per_socket=node.cores_per_socket,
        threads_per_core=node.threads_per_core,
        cpus=node.cpus,
        memory=node.memory,
    )


def _gpus(node: NodeInfo) -> Gpus | None:
    """Return a node's GPUs: of several types those that most are of, parts of a GPU (MIG) apart."""
    if not node.gpus:
        return None
    counts = gpu_counts(node)
    whole = [kind for kind in counts if not _SLICE.search(kind)] or list(counts)
    slurm_type = max(whole, key=lambda kind: counts[kind])
    model, count = slurm_type or "gpu", counts[slurm_type]
    for vendor, pattern in _VENDORS:
        if pattern.search(model):
            return Gpus(
                model=model,
                count=count,
                slurm_type=slurm_type or None,
                vendor="amd" if vendor == "amd" else "intel",
            )
    return Gpus(model=model, count=count, slurm_type=slurm_type or None)


def gpu_counts(node: NodeInfo) -> dict[str, int]:
    """Return how many GPUs of each type a node has; GPUs without a type are of the type ``""``."""
    counts: Counter[str] = Counter()
    for kind, number in node.gpus:
        counts[kind] += number
    return dict(counts)


def _plain_name(kind: NodeType) -> str:
    if kind.gpus:
        return f"gpu-{re.sub(r'[^A-Za-z0-9_.+-]', '-', kind.gpus.model)}x{kind.gpus.count}"
    return f"cpu-{kind.cpus}" if kind.cpus else "cpu"


def _only_type(partition: str, nodes: Sequence[NodeInfo], type_of: Mapping[str, str]) -> str | None:
    """Return a partition's node type if all its nodes are alike; else no limit can be told beforehand."""
    counted = Counter(type_of[node.name] for node in nodes if partition in node.partitions)
    return next(iter(counted)) if len(counted) == 1 else None


def _gpu_request(given: GpuRequest, config: Mapping[str, str]) -> GpuRequest:
    # --gpus-per-node needs the cons_tres selector; older ones only know --gres.
    select = config.get("SelectType", "")
    return "gres" if given == "gpus-per-node" and select and "cons_tres" not in select else given


def _codes(value: str) -> tuple[int, ...]:
    codes: list[int] = []
    for part in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if found:
            codes += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(codes)


def _number(value: str) -> int | None:
    return int(value) if value.isdecimal() else None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
