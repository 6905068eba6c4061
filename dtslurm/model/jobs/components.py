"""The nodes of roles: those of the main role, or a component of a heterogeneous job."""

from __future__ import annotations

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import Destination, choose_destination
from dtslurm.model.jobs.job import TaskLayout
from dtslurm.model.jobs.options import Placement
from dtslurm.model.jobs.roles import Roles, RoleSpec


def find_component_destination(role: RoleSpec, profile: ClusterProfile) -> Destination:
    """Return the partition and the nodes of a role that has a component of its own."""
    options = role.options
    return choose_destination(Placement(partition=options.partition, node_type=options.node_type), profile)


def count_gpus_of_node(role: RoleSpec, roles: Roles, layout: TaskLayout, profile: ClusterProfile) -> int:
    """Return the GPUs that the job has on each node of a role.

    In a component of its own, these are all GPUs of a node whose type the profile names, or as many as the
    role requests; none if it requests none.

    Args:
        layout: the layout of the main role.
    """
    number = roles.component_of(role)
    if not number:
        return layout.gpus_per_node
    host = roles.components[number - 1]
    node = find_component_destination(host, profile).node
    if node is not None and host.options.gpus != 0:
        return node.gpu_count
    return (host.options.gpus or 0) * roles.instances_per_node(host, layout.nodes)
