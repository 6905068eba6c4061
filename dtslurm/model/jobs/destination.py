"""Which partition and nodes a job goes to: one answer, for whoever asks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dtslurm.model.cluster import ClusterProfile, NodeType, Partition
from dtslurm.model.jobs.constraint import joined
from dtslurm.model.jobs.options import Placement
from dtslurm.model.units import Walltime
from dtslurm.model.values import dataclass

Limit = TypeVar("Limit", Walltime, int)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a job goes.

    Attributes:
        partition: as Slurm is asked for it, several as ``a,b``; None leaves it to Slurm.
        type_name: the name of its nodes' type, None where that is not known.
        node: that type.
        limits: what the profile tells of the partition; of several the widest, as Slurm takes any of them.
        qos: the QOS asked for, else the partition's, else the cluster's.
        constraint: the cluster's, the node type's and the one asked for, as one.
        left_out: those of them that it cannot hold.
    """

    partition: str | None
    type_name: str | None
    node: NodeType | None
    limits: Partition
    qos: str | None
    constraint: str | None
    left_out: tuple[str, ...] = ()


def destination(asked: Placement, profile: ClusterProfile) -> Destination:
    """Return where a job goes that asks for a partition, for a type of nodes, for both or for neither."""
    partition = _partition(asked, profile)
    type_name = asked.node_type or _type_in(partition, profile)
    node = profile.node_types.get(type_name) if type_name else None
    limits = _limits(names_in(partition), profile)
    constraint, left_out = joined(
        profile.slurm.constraint, node.constraint if node else None, asked.constraint
    )
    return Destination(
        partition=partition,
        type_name=type_name,
        node=node,
        limits=limits,
        qos=asked.qos or limits.qos or profile.slurm.qos,
        constraint=constraint,
        left_out=tuple(left_out),
    )


def names_in(partitions: str | None) -> list[str]:
    """Return the names in a list of partitions such as ``a,b``; like Slurm, without empty ones."""
    return [name for name in (partitions or "").split(",") if name]


def homes_of(type_name: str, profile: ClusterProfile) -> list[str]:
    """Return the partitions that are known to have nodes of a type, the type's own first."""
    node = profile.node_types.get(type_name)
    own = names_in(node.partition) if node else []
    stated = [name for name, one in profile.slurm.partitions.items() if one.node_type == type_name]
    return list(dict.fromkeys([*own, *stated]))


def may_have(partitions: str, type_name: str, profile: ClusterProfile) -> bool:
    """Whether one of the partitions may have nodes of a type: it has, or the profile does not tell."""
    homes, known = homes_of(type_name, profile), profile.slurm.partitions
    return any(
        name in homes or known.get(name, Partition()).node_type is None for name in names_in(partitions)
    )


def _partition(asked: Placement, profile: ClusterProfile) -> str | None:
    """Return the partition asked for, else the asked type's, else the usual one, else the default type's.

    The usual one stays where it has nodes of the type that is asked for.
    """
    usual = profile.slurm.partition
    if asked.partition:
        return asked.partition
    if asked.node_type:
        return _partition_of(asked.node_type, usual, profile)
    if usual:
        return usual
    default = profile.node_type(None)
    return default.partition if default else None


def _partition_of(type_name: str, usual: str | None, profile: ClusterProfile) -> str | None:
    node, homes = profile.node_types.get(type_name), homes_of(type_name, profile)
    if not set(names_in(usual)).isdisjoint(homes):
        return usual
    if node and node.partition:
        return node.partition
    if usual and not may_have(usual, type_name, profile) and len(homes) == 1:
        return homes[0]
    return usual


def types_of(partitions: str, profile: ClusterProfile) -> list[str]:
    """Return the node types that name one of the partitions as theirs."""
    names = set(names_in(partitions))
    return [name for name, node in profile.node_types.items() if names.intersection(names_in(node.partition))]


def _type_in(partitions: str | None, profile: ClusterProfile) -> str | None:
    """Return the node type that all of the partitions have, where one can be told."""
    types = {_type_of(name, profile) for name in names_in(partitions)} or {profile.usual_node_type}
    return types.pop() if len(types) == 1 else None


def _type_of(partition: str, profile: ClusterProfile) -> str | None:
    """Return the node type of one partition, where it can be told.

    The usual type stands for partitions that nothing is known of, unless it names a partition of its own.
    """
    usual, node = profile.usual_node_type, profile.node_type(None)
    told = profile.slurm.partitions.get(partition, Partition()).node_type
    if told:
        return told
    own = types_of(partition, profile)
    if own:
        return usual if usual in own else own[0] if len(own) == 1 else None
    return None if node and node.partition else usual


def _limits(names: Sequence[str], profile: ClusterProfile) -> Partition:
    known = [profile.slurm.partitions.get(name, Partition()) for name in names]
    if len(known) < 2:
        return known[0] if known else Partition()
    qos = {one.qos for one in known}
    return Partition(
        max_time=_widest([one.max_time for one in known]),
        max_nodes=_widest([one.max_nodes for one in known]),
        qos=qos.pop() if len(qos) == 1 else None,
    )


def _widest(limits: Sequence[Limit | None]) -> Limit | None:
    """Return the largest limit, None where there is one without any."""
    told = [limit for limit in limits if limit is not None]
    return max(told) if len(told) == len(limits) else None
