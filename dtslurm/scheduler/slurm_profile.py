"""Add a live Slurm's partitions and nodes to a cluster profile; values of the profile take precedence.

The functions here run no command.
"""

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
_MIG_SLICE = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)


def complete(
    profile: ClusterProfile,
    partitions: Sequence[PartitionInfo],
    nodes: Sequence[NodeInfo],
    config: Mapping[str, str],
) -> ClusterProfile:
    """Return ``profile`` with partitions, node types and Slurm settings added where it has none."""
    types, type_by_node = node_types(nodes)
    default = next((partition.name for partition in partitions if partition.default), None)
    type_by_partition = {
        partition.name: _single_node_type(partition.name, nodes, type_by_node) for partition in partitions
    }
    settings = profile.slurm
    has_own_types, default_type = bool(profile.node_types), profile.node_type(None)
    if not settings.partitions:
        settings = replace(
            settings,
            partitions={
                partition.name: Partition(
                    max_time=partition.max_time,
                    max_nodes=_min_known(partition.max_nodes, partition.total_nodes),
                    node_type=None if has_own_types else type_by_partition[partition.name],
                )
                for partition in partitions
            },
        )
    settings = replace(
        settings,
        partition=settings.partition or (default_type.partition if default_type else None) or default,
        gpu_request=_choose_gpu_request(settings.gpu_request, config),
        requeue_exit_codes=settings.requeue_exit_codes or _parse_exit_codes(config.get("RequeueExit", "")),
        max_array_size=settings.max_array_size or _parse_number(config.get("MaxArraySize", "")),
    )
    if has_own_types:
        return replace(profile, slurm=settings)
    return replace(profile, slurm=settings, node_types=types)


def node_types(nodes: Sequence[NodeInfo]) -> tuple[dict[str, NodeType], dict[str, str]]:
    """Group nodes with the same hardware; return the types by name and each node's type.

    Types are named ``gpu-a100x8`` or ``cpu-64``; the memory is appended where two types would have the same
    name.
    """
    node_counts = Counter(_node_type_of(node) for node in nodes)
    name_counts = Counter(_name_without_memory(node_type) for node_type in node_counts)
    names: dict[NodeType, str] = {}
    for node_type, _ in node_counts.most_common():
        name = _name_without_memory(node_type)
        if name_counts[name] > 1 and node_type.memory:
            name = f"{name}-{node_type.memory}"
        number, base_name = 1, name
        while name in names.values():
            number += 1
            name = f"{base_name}-{number}"
        names[node_type] = name
    return {name: node_type for node_type, name in names.items()}, {
        node.name: names[_node_type_of(node)] for node in nodes
    }


def _node_type_of(node: NodeInfo) -> NodeType:
    return NodeType(
        gpus=_select_gpus(node),
        sockets=node.sockets,
        cores_per_socket=node.cores_per_socket,
        threads_per_core=node.threads_per_core,
        cpus=node.cpus,
        memory=node.memory,
    )


def _select_gpus(node: NodeInfo) -> Gpus | None:
    """Return a node's GPUs, the most frequent type if there are several.

    MIG slices are returned only if the node has no whole GPU.
    """
    if not node.gpus:
        return None
    counts = gpu_counts(node)
    whole_gpu_types = [gpu_type for gpu_type in counts if not _MIG_SLICE.search(gpu_type)] or list(counts)
    slurm_type = max(whole_gpu_types, key=lambda gpu_type: counts[gpu_type])
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
    """Return the number of GPUs of each type on a node; GPUs without a type count as type ``""``."""
    counts: Counter[str] = Counter()
    for gpu_type, number in node.gpus:
        counts[gpu_type] += number
    return dict(counts)


def _name_without_memory(node_type: NodeType) -> str:
    if node_type.gpus:
        return f"gpu-{re.sub(r'[^A-Za-z0-9_.+-]', '-', node_type.gpus.model)}x{node_type.gpus.count}"
    return f"cpu-{node_type.cpus}" if node_type.cpus else "cpu"


def _single_node_type(
    partition: str, nodes: Sequence[NodeInfo], type_by_node: Mapping[str, str]
) -> str | None:
    """Return the node type of a partition if all its nodes have the same one, otherwise None.

    With several types, the type of a job's nodes is known only after Slurm has chosen the nodes.
    """
    type_counts = Counter(type_by_node[node.name] for node in nodes if partition in node.partitions)
    return next(iter(type_counts)) if len(type_counts) == 1 else None


def _choose_gpu_request(gpu_request: GpuRequest, config: Mapping[str, str]) -> GpuRequest:
    # --gpus-per-node needs the cons_tres selector; older selectors only support --gres.
    select = config.get("SelectType", "")
    return "gres" if gpu_request == "gpus-per-node" and select and "cons_tres" not in select else gpu_request


def _parse_exit_codes(value: str) -> tuple[int, ...]:
    codes: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match:
            codes += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(codes)


def _parse_number(value: str) -> int | None:
    return int(value) if value.isdecimal() else None


def _min_known(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
