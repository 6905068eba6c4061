"""Check the roles of a run against its job and the cluster: GPUs, secrets and partitions. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.components import count_gpus_of_node, find_component_destination
from dtslurm.model.jobs.destination import Destination, find_partitions_of_type, may_have, split_names
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import Roles, RoleSpec
from dtslurm.suggestions import list_nearest, suggest_name


def find_unknown_secrets(spec: JobSpec) -> Iterator[str]:
    """Yield a problem for each secret that a role names and the job does not have."""
    if spec.roles is None:
        return
    for role in spec.roles.others:
        for name in role.options.secrets or ():
            if name not in spec.secrets:
                fix = suggest_name(name, spec.secrets) or f"; add it to secrets of {spec.roles.main}"
                yield f"roles.{role.name}.secrets: the job has no secret {name}{fix}"


def find_component_conflicts(spec: JobSpec, profile: ClusterProfile) -> Iterator[str]:
    """Yield a problem for each role whose partition or node type the cluster or the job does not allow."""
    roles = spec.roles.components if spec.roles is not None else ()
    if roles and spec.array is not None:
        yield (
            f"roles.{roles[0].name}: Slurm has no arrays of heterogeneous jobs; remove its partition and "
            "node_type, or the array"
        )
    if roles and spec.allocation is not None:
        yield (
            f"roles.{roles[0].name}: a run in an allocation (--in) has only the nodes of this allocation; "
            "remove its partition and node_type"
        )
    for role in roles:
        if profile.scheduler == "local":
            key = "partition" if role.options.partition else "node_type"
            yield f"roles.{role.name}.{key}: cluster {profile.name} has no partitions; remove {key}"
        else:
            yield from _find_destination_conflicts(role, spec, profile)


def _find_destination_conflicts(role: RoleSpec, spec: JobSpec, profile: ClusterProfile) -> Iterator[str]:
    options, known_partitions = role.options, profile.slurm.partitions
    prefix = f"roles.{role.name}"
    destination = find_component_destination(role, profile)
    partition, limits = destination.partition, destination.limits
    names = split_names(options.partition) if known_partitions else []
    if unknown_names := [name for name in names if name not in known_partitions]:
        for name in unknown_names:
            yield (
                f"{prefix}.partition {name!r}: cluster {profile.name} has no such partition"
                f"{suggest_name(name, known_partitions)} (available: {list_nearest(name, known_partitions)})"
            )
    elif options.node_type is not None and options.node_type not in profile.node_types:
        nearest_types = list_nearest(options.node_type, profile.node_types)
        problem = f"cluster {profile.name} has no such type ({nearest_types})"
        yield f"{prefix}.node_type {options.node_type}: {problem}"
    elif options.node_type and partition and not may_have(partition, options.node_type, profile):
        homes = find_partitions_of_type(options.node_type, profile)
        hint = f"; give partition: {homes[0]}" if homes else ""
        yield f"{prefix}.node_type: partition {partition} has no {options.node_type} nodes{hint}"
    elif problem := _find_unknown_gpus(role, destination, profile):
        yield f"{prefix}.{problem}"
    max_time, time = limits.max_time or profile.slurm.max_time, spec.resources.time
    if time is not None and max_time is not None and time > max_time:
        yield f"--time {time}: partition {partition} of the role {role.name} allows at most {max_time}"
    if limits.max_nodes is not None and role.nodes > limits.max_nodes:
        yield f"{prefix}.nodes {role.nodes}: partition {partition} allows at most {limits.max_nodes}"


def _find_unknown_gpus(role: RoleSpec, destination: Destination, profile: ClusterProfile) -> str:
    has_gpu_nodes = any(node.gpus for node in profile.node_types.values())
    if destination.node is not None or role.options.gpus is not None or not has_gpu_nodes:
        return ""
    if role.options.nodes_per_instance > 1:
        return f"node_type: the profile does not state the nodes of {destination.partition}; give node_type"
    return (
        f"gpus: the profile does not state the GPUs of a node of {destination.partition}; give the GPUs of "
        "an instance, 0 if it needs none, or node_type"
    )


def find_gpu_conflicts(spec: JobSpec, layout: TaskLayout, profile: ClusterProfile) -> Iterator[str]:
    """Yield a problem for each role that needs more GPUs than its nodes have, or than others there leave."""
    if spec.roles is None:
        return
    yield from _find_conflicts_beside_ranks(spec.roles, layout)
    for role in spec.roles.others:
        if not role.on:
            gpus_per_node = count_gpus_of_node(role, spec.roles, layout, profile)
            yield from _find_conflicts_on(role, spec.roles, layout, gpus_per_node)


def _find_conflicts_beside_ranks(roles: Roles, layout: TaskLayout) -> Iterator[str]:
    total, ranks = layout.gpus_per_node, layout.ranks_per_node
    names, requested = _sum_guests(roles.main, roles, layout)
    if requested and requested + ranks > total:
        fewer_ranks = f"set ntasks_per_node of {roles.main} to {total - requested}, or " * (requested < total)
        yield (
            f"roles.{names}: {requested} of the {total} GPUs of a node of {roles.main} are requested, which "
            f"runs {ranks} ranks there; {fewer_ranks}use nodes of its own"
        )


def _find_conflicts_on(role: RoleSpec, roles: Roles, layout: TaskLayout, total: int) -> Iterator[str]:
    """Yield a problem if the nodes of a role have too few GPUs for it, and the roles that share them.

    Args:
        total: the GPUs of each of these nodes.
    """
    per_node = roles.instances_per_node(role, layout.nodes)
    gpus = roles.gpus_per_instance(role, layout.nodes, total)
    names, requested = _sum_guests(role.name, roles, layout)
    if gpus is None:
        if requested:
            fix = f"set gpus of {role.name} to {total - requested}" if requested < total else "request fewer"
            yield (
                f"roles.{names}: {requested} of the {total} GPUs of a node of {role.name} are requested, "
                f"which uses all of them; {fix}"
            )
    elif total and not gpus and role.options.gpus is None:
        yield (
            f"roles.{role.name}: {per_node} instances share the {total} GPUs of a node; set gpus to 0 if "
            "they need none, or give it more nodes"
        )
    elif gpus * per_node + requested > total:
        others = f", and {names} requests {requested}" if requested else ""
        yield (
            f"roles.{role.name}: its instances need {gpus * per_node} GPUs on a node that has {total}{others}"
        )


def _sum_guests(host: str, roles: Roles, layout: TaskLayout) -> tuple[str, int]:
    """Return the roles that share the nodes of a role and request GPUs, and those GPUs on each node."""
    guests = [role for role in roles.others if role.on == host and role.options.gpus]
    requested = sum(
        (role.options.gpus or 0) * roles.instances_per_node(role, layout.nodes) for role in guests
    )
    return " and ".join(role.name for role in guests), requested
