"""Groups nodes with the same hardware into kinds, despite small differences between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from dtslurm.model.cluster import NodeType
from dtslurm.model.units import Memory
from dtslurm.model.values import dataclass
from dtslurm.scheduler.slurm_profile import node_types
from dtslurm.slurm.parse_scontrol import NodeInfo

# RealMemory of equal nodes differs by what their firmware and kernel reserve.
_SIMILAR_MEMORY = 0.95
# A bare 100g may be a network speed, so the feature must also name a GPU or its memory.
_GPU_MEMORY = re.compile(
    r".*(?:hbm|gpu|vram|[ahv][12]00|l40s?|mi\d{3}x?)(?:[^0-9].*?)?(?<![0-9])(\d{2,3})g(?:b|ib)?",
    re.IGNORECASE,
)
_USABLE = re.compile(r"IDLE|MIX|ALLOC|COMPLET", re.IGNORECASE)
_UNUSABLE = re.compile(
    r"DOWN|DRAIN|FAIL|NOT_RESP|MAINT|RESERVED|PLANNED|POWER|BLOCKED|FUTURE|INVAL|UNKNOWN|\*", re.IGNORECASE
)


@dataclass(frozen=True)
class Kind:
    """A group of nodes with the same hardware."""

    name: str
    node_type: NodeType
    nodes: tuple[NodeInfo, ...]

    @property
    def partitions(self) -> list[str]:
        """The partitions of the nodes, the partition with the most of them first."""
        counts = Counter(partition for node in self.nodes for partition in node.partitions)
        return [name for name, _ in counts.most_common()]

    @property
    def idle(self) -> list[NodeInfo]:
        """The nodes that can start a job at once."""
        return [
            node
            for node in self.nodes
            if node.state.upper().startswith("IDLE") and not _UNUSABLE.search(node.state)
        ]

    @property
    def usable(self) -> list[NodeInfo]:
        """The nodes that run jobs or can run them."""
        return [node for node in self.nodes if _USABLE.match(node.state) and not _UNUSABLE.search(node.state)]


def kinds(nodes: Sequence[NodeInfo]) -> list[Kind]:
    """Group nodes with the same hardware, the group with the most GPUs first.

    Nodes whose memory differs slightly form one kind, with the least memory among them. Nodes with the same
    Slurm GPU type form two kinds if their features show different GPU memory.
    """
    normalized_nodes = _normalize_memory(nodes)
    types, type_of = node_types(normalized_nodes)
    members_by_type: dict[str, list[NodeInfo]] = {name: [] for name in types}
    for node in normalized_nodes:
        members_by_type[type_of[node.name]].append(node)
    node_kinds = []
    for name, members in members_by_type.items():
        for size, group in _group_by_gpu_memory(members):
            node_type = types[name]
            if node_type.gpus and size is not None:
                node_type = replace(node_type, gpus=replace(node_type.gpus, memory=size))
            node_kinds.append(
                Kind(
                    f"{name}-{size}" if size is not None and _has_several_gpu_sizes(members) else name,
                    node_type,
                    group,
                )
            )
    return sorted(
        node_kinds, key=lambda kind: (-kind.node_type.gpu_count * len(kind.nodes), -len(kind.nodes))
    )


def own_features(kind: Kind, nodes: Iterable[NodeInfo]) -> list[str]:
    """Return the features that all nodes of a kind have, and no other node in their partitions has."""
    partitions = set(kind.partitions)
    own_names = {node.name for node in kind.nodes}
    other_features = {
        feature
        for node in nodes
        if node.name not in own_names and partitions.intersection(node.partitions)
        for feature in node.features
    }
    common = set.intersection(*(set(node.features) for node in kind.nodes)) if kind.nodes else set()
    return sorted((feature for feature in common - other_features), key=lambda name: (len(name), name))


def _normalize_memory(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes; nodes of the same hardware with similar memory get the least memory among them."""

    def hardware(node: NodeInfo) -> tuple[object, ...]:
        return (node.gpus, node.sockets, node.cores_per_socket, node.threads_per_core, node.cpus)

    def sort_key(node: NodeInfo) -> tuple[str, int]:
        return repr(hardware(node)), node.memory.mib if node.memory else 0

    normalized_nodes = []
    min_memory: Memory | None = None
    for _, group in groupby(sorted(nodes, key=sort_key), key=lambda node: repr(hardware(node))):
        min_memory = None
        for node in group:
            if (
                node.memory is None
                or min_memory is None
                or min_memory.mib < node.memory.mib * _SIMILAR_MEMORY
            ):
                min_memory = node.memory
            normalized_nodes.append(replace(node, memory=min_memory))
    by_name = {node.name: node for node in normalized_nodes}
    return [by_name[node.name] for node in nodes]


def _group_by_gpu_memory(nodes: Sequence[NodeInfo]) -> list[tuple[Memory | None, tuple[NodeInfo, ...]]]:
    groups: dict[Memory | None, list[NodeInfo]] = {}
    for node in nodes:
        groups.setdefault(gpu_memory(node.features) if node.gpus else None, []).append(node)
    return [(size, tuple(group)) for size, group in groups.items()]


def _has_several_gpu_sizes(nodes: Sequence[NodeInfo]) -> bool:
    return len(_group_by_gpu_memory(nodes)) > 1


def gpu_memory(features: Iterable[str]) -> Memory | None:
    """Return a GPU's memory if a feature names it: ``hbm80g``, ``GPU_MEM:32GB``, ``a100-80gb``."""
    sizes = {int(match[1]) for feature in features if (match := _GPU_MEMORY.fullmatch(feature))}
    return Memory(next(iter(sizes)) * 1024) if len(sizes) == 1 else None
