"""Which partition and nodes a job goes to: one answer, for whoever asks. Pure."""

from __future__ import annotations

from dtslurm.model.cluster import ClusterProfile, NodeType, Partition
from dtslurm.model.options import Placement
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a job goes.

    Attributes:
        partition: as Slurm is asked for it; None leaves it to Slurm.
        type_name: the name of its nodes' type, None where that is not known.
        node: that type.
        limits: what the profile tells of the partition.
    """

    partition: str | None
    type_name: str | None
    node: NodeType | None
    limits: Partition


def destination(asked: Placement, profile: ClusterProfile) -> Destination:
    """Return where a job goes that asks for a partition, for a type of nodes, for both or for neither."""
    partition = _partition(asked, profile)
    type_name = asked.node_type or _type_in(partition, profile)
    return Destination(
        partition=partition,
        type_name=type_name,
        node=profile.node_types.get(type_name) if type_name else None,
        limits=profile.slurm.partitions.get(partition or "", Partition()),
    )


def homes_of(type_name: str, profile: ClusterProfile) -> list[str]:
    """Return the partitions that are known to have nodes of a type, the type's own first."""
    node = profile.node_types.get(type_name)
    own = [node.partition] if node and node.partition else []
    stated = [name for name, one in profile.slurm.partitions.items() if one.node_type == type_name]
    return list(dict.fromkeys([*own, *stated]))


def may_have(partition: str, type_name: str, profile: ClusterProfile) -> bool:
    """Whether a partition may have nodes of a type: it has, or the profile does not tell of its nodes."""
    told = profile.slurm.partitions.get(partition, Partition()).node_type
    return told is None or partition in homes_of(type_name, profile)


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
    if usual in homes:
        return usual
    if node and node.partition:
        return node.partition
    if usual and not may_have(usual, type_name, profile) and len(homes) == 1:
        return homes[0]
    return usual


def types_of(partition: str, profile: ClusterProfile) -> list[str]:
    """Return the node types that name a partition as theirs."""
    return [name for name, node in profile.node_types.items() if node.partition == partition]


def _type_in(partition: str | None, profile: ClusterProfile) -> str | None:
    """Return the node type of a partition, where one can be told.

    The usual type stands for partitions that nothing is known of, unless it names a partition of its own.
    """
    usual, node = profile.usual_node_type, profile.node_type(None)
    if partition is None:
        return usual
    told = profile.slurm.partitions.get(partition, Partition()).node_type
    if told:
        return told
    own = types_of(partition, profile)
    if own:
        return usual if usual in own else own[0] if len(own) == 1 else None
    return None if node and node.partition else usual
