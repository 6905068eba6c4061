"""Layout of a job: how many ranks run on which nodes, from the request and the cluster profile."""

from __future__ import annotations

from dtslurm.model.cluster import ClusterProfile, NodeType
from dtslurm.model.diagnostics import Diagnostics
from dtslurm.model.jobs.destination import Destination, choose_destination, types_of
from dtslurm.model.jobs.job import Resources, TaskLayout
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.suggestions import list_nearest


@dataclass
class Resolution(Diagnostics):
    """A layout, or the errors that prevent one; notes explain choices made for the user."""

    layout: TaskLayout | None = None


def resolve(resources: Resources, profile: ClusterProfile, *, one_process: bool = False) -> Resolution:
    """Return the layout of a job on the nodes of ``profile``.

    Defaults: all GPUs of a node if the request or the profile names the node type (else none); one rank per
    GPU (else one); each rank's share of the node's CPUs.

    Args:
        one_process: the launcher starts a single process, whatever the number of GPUs.
    """
    resolution = Resolution()
    if resources.node_type is not None and resources.node_type not in profile.node_types:
        nearest_types = list_nearest(resources.node_type, profile.node_types)
        resolution.error(
            f"--node-type {resources.node_type}: cluster {profile.name} has no such type ({nearest_types})"
        )
    target = choose_destination(resources, profile)
    node, label = target.node, target.type_name or "these"

    nodes = resources.nodes if resources.nodes is not None else 1
    gpus = _choose_gpus_per_node(resources, profile, target, label, resolution)
    ranks = _choose_ranks_per_node(resources, gpus, one_process)
    cpus = _choose_cpus_per_rank(resources, node, gpus, ranks)
    _check_counts(nodes, gpus, ranks, resources, resolution)
    _check_node(node, label, gpus, resources, resolution)
    if profile.scheduler != "local":  # locally, ranks share CPUs, and a notice gives their number
        _check_cpus(node, label, ranks, cpus, resolution)
    if cpus is None and gpus and not (profile.slurm.exclusive or profile.slurm.gpu_request == "none"):
        resolution.note(
            f"the number of CPUs of {label} nodes is not known, and Slurm may allocate a single CPU "
            "for all ranks of a node: give -c"
        )
    if not resolution.problems:
        resolution.layout = TaskLayout(
            nodes=nodes,
            ranks_per_node=ranks,
            gpus_per_node=gpus,
            cpus_per_rank=cpus,
            mem=resources.mem or _choose_memory(profile, node, gpus, resolution),
            time=resources.time or _choose_time(profile, target, resolution),
            one_process=one_process,
        )
    return resolution


def _choose_gpus_per_node(
    resources: Resources, profile: ClusterProfile, destination: Destination, label: str, result: Resolution
) -> int:
    node = destination.node
    if resources.gpus_per_node is not None:
        return resources.gpus_per_node
    if destination.type_name is None and destination.partition is not None:
        result.note(*_explain_unknown_nodes(destination.partition, profile))
    if node is None or not node.gpus:
        return 0
    if not (resources.node_type or profile.default_node_type):  # only the partition implies the node type
        result.note(
            f"no GPUs requested: {label} nodes have {node.gpu_count}; request GPUs with --gpus-per-node"
        )
        return 0
    which_gpus = "the GPU" if node.gpu_count == 1 else f"all {node.gpu_count} GPUs"
    result.note(f"{which_gpus} of each {label} node (--gpus-per-node to change)")
    return node.gpu_count


def _explain_unknown_nodes(partition: str, profile: ClusterProfile) -> list[str]:
    """Return how to request GPUs in a partition whose node type is ambiguous or unknown."""
    type_names = types_of(partition, profile)
    if not any(profile.node_types[name].gpus for name in type_names or profile.node_types):
        return []
    if type_names:
        return [
            f"no GPUs requested: the nodes of {partition} differ; give --node-type {' or '.join(type_names)}"
        ]
    problem = f"no GPUs requested: the node types of {partition} are not known"
    return [f"{problem}; request GPUs with --gpus-per-node"]


def _choose_ranks_per_node(resources: Resources, gpus: int, one_process: bool) -> int:
    if resources.ntasks_per_node is not None:
        return resources.ntasks_per_node
    return 1 if one_process else max(1, gpus)


def _choose_cpus_per_rank(resources: Resources, node: NodeType | None, gpus: int, ranks: int) -> int | None:
    if resources.cpus_per_task is not None:
        return resources.cpus_per_task
    if node is None or not node.schedulable_cpus or not gpus or ranks <= 0:
        return None
    share = node.schedulable_cpus * min(gpus, node.gpu_count) // max(1, node.gpu_count)
    return max(1, share // ranks)


def _choose_memory(
    profile: ClusterProfile, node: NodeType | None, gpus: int, result: Resolution
) -> Memory | None:
    """Return the memory of a job that requests none.

    If the default is all of a node's memory, a job that leaves GPUs to others requests none.
    """
    default, slurm = profile.slurm.default_mem, profile.slurm
    leaves_gpus = node is not None and gpus < node.gpu_count and not slurm.exclusive
    if default is None or default.mib or not leaves_gpus:
        return default
    result.note("no --mem given: Slurm's default applies, which is small on this cluster")
    return None


def _choose_time(profile: ClusterProfile, destination: Destination, result: Resolution) -> Walltime | None:
    """Return the time limit of a job that requests none, reduced to the partition's maximum."""
    default, maximum = profile.slurm.default_time, destination.limits.max_time
    if default is None or maximum is None or default <= maximum:
        return default
    result.note(
        f"--time {maximum}: the maximum of partition {destination.partition}; the usual default is {default}"
    )
    return maximum


def _check_counts(nodes: int, gpus: int, ranks: int, resources: Resources, result: Resolution) -> None:
    for flag, value, minimum in (
        ("--nodes", nodes, 1),
        ("--gpus-per-node", gpus, 0),
        ("--ntasks-per-node", ranks, 1),
        ("--cpus-per-task", 1 if resources.cpus_per_task is None else resources.cpus_per_task, 1),
    ):
        if value < minimum:
            result.error(f"{flag} must be at least {minimum}, not {value}")
    if gpus > 0 and ranks > gpus:
        result.note(f"{ranks} ranks share {gpus} GPUs on each node")


def _check_node(
    node: NodeType | None,
    label: str,
    gpus: int,
    resources: Resources,
    result: Resolution,
) -> None:
    if node is None:
        return
    if node.gpus is not None and gpus > node.gpu_count:
        result.error(f"--gpus-per-node {gpus}: a {label} node has {node.gpu_count}")
    if resources.mem and node.memory and resources.mem > node.memory:
        result.error(f"--mem {resources.mem}: a {label} node has {node.memory}")


def _check_cpus(node: NodeType | None, label: str, ranks: int, cpus: int | None, result: Resolution) -> None:
    if node and cpus and node.schedulable_cpus and cpus * ranks > node.schedulable_cpus:
        result.error(
            f"{pluralize(ranks, 'rank')} x {pluralize(cpus, 'CPU')} = "
            f"{pluralize(cpus * ranks, 'CPU')} per node: a {label} node has {node.schedulable_cpus}"
        )
