"""Nodes of the same make, however many there are and however they differ."""

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

# Slurm's memory of like nodes differs by what firmware and kernel keep.
_LIKE = 0.95
# A bare 100g may be a network's speed: the feature must speak of a GPU.
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
    """Nodes of one make."""

    name: str
    node_type: NodeType
    nodes: tuple[NodeInfo, ...]

    @property
    def partitions(self) -> list[str]:
        """The partitions that hold such nodes, that with most of them first."""
        counts = Counter(partition for node in self.nodes for partition in node.partitions)
        return [name for name, _ in counts.most_common()]

    @property
    def idle(self) -> list[NodeInfo]:
        """The nodes that could take a job at once."""
        return [
            node
            for node in self.nodes
            if node.state.upper().startswith("IDLE") and not _UNUSABLE.search(node.state)
        ]

    @property
    def usable(self) -> list[NodeInfo]:
        """The nodes that run jobs, or could."""
        return [node for node in self.nodes if _USABLE.match(node.state) and not _UNUSABLE.search(node.state)]


def kinds(nodes: Sequence[NodeInfo]) -> list[Kind]:
    """Group nodes of the same make, those with most GPUs first.

    Nodes whose memory differs a little are of one make: that with the least counts. GPUs of one Slurm type
    whose nodes' features tell of different memory are of two.
    """
    like = _like(nodes)
    types, type_of = node_types(like)
    found: dict[str, list[NodeInfo]] = {name: [] for name in types}
    for node in like:
        found[type_of[node.name]].append(node)
    made = []
    for name, members in found.items():
        for size, group in _by_gpu_memory(members):
            own = types[name]
            if own.gpus and size is not None:
                own = replace(own, gpus=replace(own.gpus, memory=size))
            made.append(
                Kind(f"{name}-{size}" if size is not None and _several(members) else name, own, group)
            )
    return sorted(made, key=lambda kind: (-kind.node_type.gpu_count * len(kind.nodes), -len(kind.nodes)))


def own_features(kind: Kind, nodes: Iterable[NodeInfo]) -> list[str]:
    """Return the features that all nodes of a kind have, and no other node of their partitions has."""
    partitions = set(kind.partitions)
    mine = {node.name for node in kind.nodes}
    others = {
        feature
        for node in nodes
        if node.name not in mine and partitions.intersection(node.partitions)
        for feature in node.features
    }
    shared = set.intersection(*(set(node.features) for node in kind.nodes)) if kind.nodes else set()
    return sorted((feature for feature in shared - others), key=lambda name: (len(name), name))


def _like(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes, with the least memory of those that hardly differ."""

    def make(node: NodeInfo) -> tuple[object, ...]:
        return (node.gpus, node.sockets, node.cores_per_socket, node.threads_per_core, node.cpus)

    def order(node: NodeInfo) -> tuple[str, int]:
        return repr(make(node)), node.memory.mib if node.memory else 0

    found = []
    least: Memory | None = None
    for _, group in groupby(sorted(nodes, key=order), key=lambda node: repr(make(node))):
        least = None
        for node in group:
            if node.memory is None or least is None or least.mib < node.memory.mib * _LIKE:
                least = node.memory
            found.append(replace(node, memory=least))
    by_name = {node.name: node for node in found}
    return [by_name[node.name] for node in nodes]


def _by_gpu_memory(nodes: Sequence[NodeInfo]) -> list[tuple[Memory | None, tuple[NodeInfo, ...]]]:
    groups: dict[Memory | None, list[NodeInfo]] = {}
    for node in nodes:
        groups.setdefault(gpu_memory(node.features) if node.gpus else None, []).append(node)
    return [(size, tuple(group)) for size, group in groups.items()]


def _several(nodes: Sequence[NodeInfo]) -> bool:
    return len(_by_gpu_memory(nodes)) > 1


def gpu_memory(features: Iterable[str]) -> Memory | None:
    """Return a GPU's memory where a feature tells it: ``hbm80g``, ``GPU_MEM:32GB``, ``a100-80gb``."""
    sizes = {int(found[1]) for feature in features if (found := _GPU_MEMORY.fullmatch(feature))}
    return Memory(next(iter(sizes)) * 1024) if len(sizes) == 1 else None
