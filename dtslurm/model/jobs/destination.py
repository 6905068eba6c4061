"""The partition and the nodes that a job goes to, determined in one place. No side effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dtslurm.model.cluster import ClusterProfile, NodeType, Partition
from dtslurm.model.jobs.constraint import join_constraints
from dtslurm.model.jobs.options import Placement
from dtslurm.model.units import Walltime
from dtslurm.model.values import dataclass

Limit = TypeVar("Limit", Walltime, int)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The partition and nodes of a job.

    Attributes:
        partition: the value of ``--partition``, several as ``a,b``; None leaves the choice to Slurm.
        type_name: the name of the nodes' type, None if it is unknown.
        node: that node type.
        limits: the partition's limits in the profile; of several partitions the widest, as Slurm may use any
            of them.
        qos: the requested QOS, else the partition's, else the cluster's.
        constraint: the constraints of the cluster, the node type and the request, combined.
        left_out: those constraints that could not be combined.
    """

    partition: str | None
    type_name: str | None
    node: NodeType | None
    limits: Partition
    qos: str | None
    constraint: str | None
    left_out: tuple[str, ...] = ()


def choose_destination(placement: Placement, profile: ClusterProfile) -> Destination:
    """Return the destination of a job, which may request a partition, a node type, both or neither."""
    partition = _choose_partition(placement, profile)
    type_name = placement.node_type or _find_common_type(partition, profile)
    node = profile.node_types.get(type_name) if type_name else None
    limits = _merge_limits(split_names(partition), profile)
    constraint, left_out = join_constraints(
        profile.slurm.constraint, node.constraint if node else None, placement.constraint
    )
    return Destination(
        partition=partition,
        type_name=type_name,
        node=node,
        limits=limits,
        qos=placement.qos or limits.qos or profile.slurm.qos,
        constraint=constraint,
        left_out=tuple(left_out),
    )


def split_names(partitions: str | None) -> list[str]:
    """Return the names in a list of partitions such as ``a,b``; like Slurm, without empty names."""
    return [name for name in (partitions or "").split(",") if name]


def find_partitions_of_type(type_name: str, profile: ClusterProfile) -> list[str]:
    """Return the partitions that have nodes of a type according to the profile, the type's own first."""
    node = profile.node_types.get(type_name)
    own_partitions = split_names(node.partition) if node else []
    declaring = [
        name for name, partition in profile.slurm.partitions.items() if partition.node_type == type_name
    ]
    return list(dict.fromkeys([*own_partitions, *declaring]))


def may_have(partitions: str, type_name: str, profile: ClusterProfile) -> bool:
    """Return whether a partition has nodes of a type, or the profile does not list its nodes."""
    homes, partitions_in_profile = find_partitions_of_type(type_name, profile), profile.slurm.partitions
    return any(
        name in homes or partitions_in_profile.get(name, Partition()).node_type is None
        for name in split_names(partitions)
    )


def _choose_partition(placement: Placement, profile: ClusterProfile) -> str | None:
    """Return the requested partition, else that of the requested type, the cluster or the default type.

    The cluster's partition takes precedence if it has nodes of the requested type.
    """
    default_partition = profile.slurm.partition
    if placement.partition:
        return placement.partition
    if placement.node_type:
        return _choose_partition_for_type(placement.node_type, default_partition, profile)
    if default_partition:
        return default_partition
    default_type = profile.node_type(None)
    return default_type.partition if default_type else None


def _choose_partition_for_type(
    type_name: str, default_partition: str | None, profile: ClusterProfile
) -> str | None:
    node, homes = profile.node_types.get(type_name), find_partitions_of_type(type_name, profile)
    if not set(split_names(default_partition)).isdisjoint(homes):
        return default_partition
    if node and node.partition:
        return node.partition
    if default_partition and not may_have(default_partition, type_name, profile) and len(homes) == 1:
        return homes[0]
    return default_partition


def types_of(partitions: str, profile: ClusterProfile) -> list[str]:
    """Return the node types whose own partitions include one of these partitions."""
    names = set(split_names(partitions))
    return [
        name for name, node in profile.node_types.items() if names.intersection(split_names(node.partition))
    ]


def _find_common_type(partitions: str | None, profile: ClusterProfile) -> str | None:
    """Return the node type that all of the partitions have, None if it is ambiguous."""
    types = {_find_type(name, profile) for name in split_names(partitions)} or {profile.usual_node_type}
    return types.pop() if len(types) == 1 else None


def _find_type(partition: str, profile: ClusterProfile) -> str | None:
    """Return the node type of one partition, None if it is unknown.

    The usual type applies to partitions without any information, unless the type has a partition of its own.
    """
    usual_type, node = profile.usual_node_type, profile.node_type(None)
    type_name = profile.slurm.partitions.get(partition, Partition()).node_type
    if type_name:
        return type_name
    own_types = types_of(partition, profile)
    if own_types:
        return usual_type if usual_type in own_types else own_types[0] if len(own_types) == 1 else None
    return None if node and node.partition else usual_type


def _merge_limits(names: Sequence[str], profile: ClusterProfile) -> Partition:
    limits = [profile.slurm.partitions.get(name, Partition()) for name in names]
    if len(limits) < 2:
        return limits[0] if limits else Partition()
    qos = {partition.qos for partition in limits}
    return Partition(
        max_time=_find_largest([partition.max_time for partition in limits]),
        max_nodes=_find_largest([partition.max_nodes for partition in limits]),
        qos=qos.pop() if len(qos) == 1 else None,
    )


def _find_largest(limits: Sequence[Limit | None]) -> Limit | None:
    """Return the largest limit, None if one of the limits is None."""
    finite = [limit for limit in limits if limit is not None]
    return max(finite) if len(finite) == len(limits) else None
