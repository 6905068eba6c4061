"""Convert the survey of a login node to facts for a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dtslurm.discover.facts import Confidence, DiscoveredCluster, Fact, join_names
from dtslurm.discover.kinds import Kind, gpu_memory, own_features
from dtslurm.model.cluster import ClusterProfile, Gpus
from dtslurm.presentation.quantities import pluralize
from dtslurm.scheduler.slurm_profile import gpu_counts
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo
from dtslurm.slurm.survey import Survey

_PARTITION = "scontrol show partition"
_CONFIG = "scontrol show config"
_USEFUL_MODULES = (
    "cuda",
    "nccl",
    "rccl",
    "ofi",
    "rocm",
    "torch",
    "openmpi",
    "mpich",
    "apptainer",
    "singularity",
)
_MAX_SHOWN_MODULES = 12
_RUNTIMES = {
    "apptainer": "apptainer",
    "singularity": "singularity",
    "podman-hpc": "podman-hpc",
    "shifter": "shifter",
}
_SCRATCH_VARIABLES = ("SCRATCH", "PSCRATCH", "WORK", "FASTSCRATCH")


def facts_from_survey(
    survey: Survey, kinds: Sequence[Kind], parent: ClusterProfile | None = None
) -> DiscoveredCluster:
    """Return the facts in the survey.

    Args:
        kinds: the groups of equal nodes.
        parent: the profile that the new one extends; kinds get the names of its equal node types.
    """
    names = names_of(kinds, parent)
    facts = [
        *_slurm_facts(survey, kinds),
        *_partition_facts(survey, kinds, names),
        *_node_facts(survey, kinds, names),
        *_environment_facts(survey),
    ]
    return DiscoveredCluster(
        tuple(facts), dict(_remarks(survey, kinds, names)), tuple(_notices(survey, kinds, names))
    )


def names_of(kinds: Sequence[Kind], parent: ClusterProfile | None) -> dict[str, str]:
    """Return the profile's name of each kind.

    It is the name of the node type in ``parent`` with the same GPUs, if there is exactly one.
    """
    names = {kind.name: kind.name for kind in kinds}
    for kind in kinds:
        matches = (
            [
                name
                for name, node_type in parent.node_types.items()
                if _has_matching_gpus(kind, node_type.gpus)
            ]
            if parent
            else []
        )
        kinds_with_same_gpus = [
            other_kind
            for other_kind in kinds
            if other_kind is not kind and matches and _has_same_gpus(kind, other_kind)
        ]
        if len(matches) == 1 and not kinds_with_same_gpus:
            names[kind.name] = matches[0]
    name_counts = Counter(names.values())
    return {kind_name: name if name_counts[name] == 1 else kind_name for kind_name, name in names.items()}


def _has_same_gpus(first_kind: Kind, second_kind: Kind) -> bool:
    first_gpus, second_gpus = first_kind.node_type.gpus, second_kind.node_type.gpus
    return (
        first_gpus is not None
        and second_gpus is not None
        and (first_gpus.model, first_gpus.count, first_gpus.memory)
        == (second_gpus.model, second_gpus.count, second_gpus.memory)
    )


def _has_matching_gpus(kind: Kind, profile_gpus: Gpus | None) -> bool:
    gpus = kind.node_type.gpus
    if gpus is None or profile_gpus is None or gpus.count != profile_gpus.count:
        return False
    if gpus.memory and profile_gpus.memory and gpus.memory != profile_gpus.memory:
        return False
    if gpus.slurm_type is None:
        return True
    return gpus.slurm_type == profile_gpus.slurm_type or gpus.model.lower() in profile_gpus.model.lower()


# ---- Slurm settings ----


def _slurm_facts(survey: Survey, kinds: Sequence[Kind]) -> Iterator[Fact]:
    config = survey.config

    def fact(
        key: str, value: str | int | bool | tuple[str, ...], evidence: str, confidence: Confidence = "sure"
    ) -> Fact:
        return Fact(("slurm", key), value, evidence, confidence)

    if survey.version:
        yield fact("version", survey.version, _CONFIG)
    accounts = list(dict.fromkeys(association.account for association in survey.associations))
    if len(accounts) == 1:
        yield fact("account", accounts[0], "sacctmgr: the only account of your user")
    default_partitions = [partition.name for partition in survey.partitions if partition.default]
    if default_partitions:
        yield fact("partition", default_partitions[0], f"{_PARTITION}: Default=YES")
    yield from _gpu_request_facts(survey, kinds)
    if survey.partitions and all(partition.exclusive for partition in survey.partitions):
        yield fact("exclusive", True, f"{_PARTITION}: OverSubscribe=EXCLUSIVE in all partitions")
    elif config.get("SelectType") == "select/linear":
        yield fact("exclusive", True, f"{_CONFIG}: SelectType=select/linear allocates whole nodes")
    max_array_size = config.get("MaxArraySize", "")
    if max_array_size.isdecimal() and int(max_array_size) > 0:
        yield fact("max_array_size", int(max_array_size), f"{_CONFIG}: MaxArraySize")
    codes = config.get("RequeueExit", "")
    if codes and all(code.strip().isdecimal() and 0 < int(code) < 256 for code in codes.split(",")):
        exit_codes = tuple(code.strip() for code in codes.split(","))
        yield fact("requeue_exit_codes", exit_codes, f"{_CONFIG}: RequeueExit")
    default_mpi = config.get("MpiDefault", "")
    if default_mpi in {"", "none"} and "pmix" in survey.offered:
        yield fact(
            "mpi", "pmix", f"srun --mpi=list: {join_names(survey.offered)}; MpiDefault is none", "likely"
        )


def _gpu_request_facts(survey: Survey, kinds: Sequence[Kind]) -> Iterator[Fact]:
    """Yield the form of GPU requests, which depends on SelectType and on the GPU types of partitions."""
    key, select_type = ("slurm", "gpu_request"), survey.config.get("SelectType", "")
    gpu_kinds = [kind for kind in kinds if kind.node_type.gpus]
    if not gpu_kinds:
        return
    mixed_partitions = [
        partition for partition in survey.partitions if len(_gpu_types(partition, gpu_kinds)) > 1
    ]
    mixed_kinds = [
        kind
        for kind in gpu_kinds
        if any(_has_nodes_in(kind, partition.name) for partition in mixed_partitions)
    ]
    suffix = "-typed" if any(_slurm_gpu_type(kind) for kind in mixed_kinds) else ""
    reason = (
        f"Gres: GPUs of several types in {join_names(partition.name for partition in mixed_partitions)}; "
        if suffix
        else ""
    )
    if select_type and "cons_tres" not in select_type:
        yield Fact(key, f"gres{suffix}", f"{reason}{_CONFIG}: {select_type} does not support --gpus-per-node")
    else:
        yield Fact(
            key, f"gpus-per-node{suffix}", f"{reason}{_CONFIG}: {select_type or 'no SelectType'}", "likely"
        )


def _slurm_gpu_type(kind: Kind) -> str | None:
    return kind.node_type.gpus.slurm_type if kind.node_type.gpus else None


def _gpu_types(partition: PartitionInfo, kinds: Sequence[Kind]) -> set[str]:
    nodes = (node for kind in kinds for node in kind.nodes if partition.name in node.partitions)
    return {name for node in nodes for name in gpu_counts(node)}


def _describe_mixed_gpus(kind: Kind) -> str:
    """Return a node's GPU types if a node has several (``1 a100, 3 1g.10gb``), or "" if no node has."""
    counts_by_type = next((counts for node in kind.nodes if len(counts := gpu_counts(node)) > 1), {})
    return join_names(f"{number} {name or 'without a type'}" for name, number in counts_by_type.items())


def _has_nodes_in(kind: Kind, partition: str) -> bool:
    return any(partition in node.partitions for node in kind.nodes)


def _partition_facts(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[Fact]:
    for partition in survey.partitions:
        key_prefix = ("slurm", "partitions", partition.name)
        if partition.max_time is not None:
            yield Fact((*key_prefix, "max_time"), str(partition.max_time), f"{_PARTITION}: MaxTime")
        node_limits = [number for number in (partition.max_nodes, partition.total_nodes) if number]
        if node_limits:
            source = (
                "MaxNodes"
                if partition.max_nodes and partition.max_nodes == min(node_limits)
                else "TotalNodes"
            )
            yield Fact((*key_prefix, "max_nodes"), min(node_limits), f"{_PARTITION}: {source}")
        partition_kinds = [kind for kind in kinds if _has_nodes_in(kind, partition.name)]
        if len(partition_kinds) == 1:
            yield Fact(
                (*key_prefix, "node_type"),
                names[partition_kinds[0].name],
                f"{survey.by}: all nodes of the partition have the same type",
            )
        notes = _partition_notes(partition, partition_kinds, names)
        if notes:
            yield Fact((*key_prefix, "note"), "; ".join(notes), _PARTITION)


def _partition_notes(
    partition: PartitionInfo, partition_kinds: Sequence[Kind], names: dict[str, str]
) -> list[str]:
    notes = []
    if partition.state not in {"UP", ""}:
        notes.append(f"state at discovery: {partition.state}")
    if len(partition_kinds) > 1:
        kinds = (
            f"{sum(partition.name in node.partitions for node in kind.nodes):,} {names[kind.name]}"
            for kind in partition_kinds
        )
        notes.append(f"several node types: {join_names(kinds)}")
    for noun, allowed in (("accounts", partition.allow_accounts), ("QOS", partition.allow_qos)):
        if allowed:
            notes.append(f"only for {noun} {join_names(allowed)}")
    return notes


# ---- Nodes ----


def _node_facts(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[Fact]:
    default_partition = next((partition.name for partition in survey.partitions if partition.default), None)
    for kind in kinds:
        yield from _node_type_facts(survey, kind, names[kind.name], default_partition)
    if len(kinds) > 1:
        default_kinds = [
            kind for kind in kinds if default_partition and _has_nodes_in(kind, default_partition)
        ]
        most_common = max(
            default_kinds or kinds, key=lambda kind: (kind.node_type.gpu_count > 0, len(kind.nodes))
        )
        noun = "GPU nodes" if most_common.node_type.gpus else "nodes"
        scope = f" of partition {default_partition}" if default_kinds else ""
        evidence = f"most of the {noun}{scope}"
        yield Fact(("default_node_type",), names[most_common.name], evidence, "guess")


def _node_type_facts(survey: Survey, kind: Kind, name: str, default_partition: str | None) -> Iterator[Fact]:
    node_type, key_prefix = kind.node_type, ("node_types", name)
    source = f"{survey.by}: {pluralize(len(kind.nodes), 'node')}"

    def fact(key: str, value: str | int, evidence: str, confidence: Confidence = "sure") -> Fact:
        return Fact((*key_prefix, *key.split(".")), value, evidence, confidence)

    if kind.partitions:
        partition = default_partition if default_partition in kind.partitions else kind.partitions[0]
        other_partitions_text = (
            f", as in {join_names(other for other in kind.partitions if other != partition)}"
        )
        yield fact(
            "partition",
            partition,
            source + (other_partitions_text if len(kind.partitions) > 1 else ""),
            "likely",
        )
    if node_type.gpus:
        gpu_types = _describe_mixed_gpus(kind)
        gres = f"Gres: {gpu_types}" if gpu_types else "Gres"
        yield fact("gpus.model", node_type.gpus.model, f"{source}, Gres", "guess" if gpu_types else "likely")
        yield fact("gpus.count", node_type.gpus.count, gres, "guess" if gpu_types else "sure")
        if node_type.gpus.memory:
            features = [feature for feature in kind.nodes[0].features if gpu_memory([feature])]
            yield fact("gpus.memory", str(node_type.gpus.memory), f"feature {join_names(features)}", "likely")
        if node_type.gpus.slurm_type:
            yield fact("gpus.slurm_type", node_type.gpus.slurm_type, "Gres")
        yield fact("gpus.vendor", node_type.gpus.vendor, "the GPU's name in Gres", "guess")
    if node_type.sockets and node_type.cores_per_socket:
        yield fact("sockets", node_type.sockets, source)
        yield fact("cores_per_socket", node_type.cores_per_socket, survey.by)
        yield fact("threads_per_core", min(node_type.threads_per_core, 8), survey.by)
    if node_type.cpus:
        yield fact("cpus", node_type.cpus, f"{survey.by}: CPUs that jobs may use")
    if node_type.memory:
        yield fact("memory", str(node_type.memory), f"{survey.by}: smallest RealMemory")
    features = own_features(kind, survey.nodes) if _shares_partitions(kind, survey.nodes) else []
    if features:
        yield fact(
            "constraint", features[0], "in their partitions, only these nodes have this feature", "likely"
        )


def _shares_partitions(kind: Kind, nodes: Sequence[NodeInfo]) -> bool:
    """Return whether a kind's partitions also have other nodes: then a partition does not select the kind."""
    own_names, partitions = {node.name for node in kind.nodes}, set(kind.partitions)
    return any(node.name not in own_names and partitions.intersection(node.partitions) for node in nodes)


# ---- Paths, containers and remarks ----


def _environment_facts(survey: Survey) -> Iterator[Fact]:
    for variable in _SCRATCH_VARIABLES:
        folder = next((candidate for candidate in survey.folders if candidate.variable == variable), None)
        if folder:
            size = f", {folder.kind} of {folder.size / 2**30:,.1f} TiB" if folder.size else ""
            yield Fact(("paths", "scratch"), f"${variable}", f"login shell: {folder.path}{size}", "likely")
            break
    if survey.pyxis:
        yield Fact(("container", "runtime"), "pyxis", "srun --help has --container-image")
        return
    runtimes = [_RUNTIMES[name] for name in survey.runtimes if name in _RUNTIMES]
    if runtimes:
        yield Fact(("container", "runtime"), runtimes[0], "on the login node's PATH", "likely")


def _remarks(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    accounts = list(dict.fromkeys(association.account for association in survey.associations))
    if len(accounts) > 1:
        yield (
            "slurm",
            [f"account: your accounts are {join_names(accounts, 12)} (sacctmgr); set the account to use"],
        )
    for kind in kinds:
        unusable_count = len(kind.nodes) - len(kind.usable)
        lines = [f"{pluralize(len(kind.nodes), 'node')}: {join_names((node.name for node in kind.nodes), 3)}"]
        if unusable_count:
            lines.append(f"{unusable_count:,} of them were unavailable at discovery")
        yield f"node_types.{names[kind.name]}", lines
    modules = [name for name in survey.modules if any(word in name.lower() for word in _USEFUL_MODULES)]
    if modules:
        yield "environment", [f"available modules: {join_names(modules, _MAX_SHOWN_MODULES)}"]
    folder_texts = [
        f"{folder.variable}={folder.path}"
        + (
            f" ({folder.kind}, {folder.free / 2**20:,.0f} GiB free of {folder.size / 2**20:,.0f})"
            if folder.size and folder.free is not None
            else ""
        )
        for folder in survey.folders
    ]
    if folder_texts:
        yield "paths", folder_texts


def _notices(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[str]:
    for name in survey.silent:
        message = survey.silent[name]
        if name == "associations":
            yield f"accounting did not answer, so accounts and QOS are unknown ({message})"
        else:
            yield f"Slurm did not report its {name} ({message})"
    private_data = survey.config.get("PrivateData", "")
    if "nodes" in private_data or "partitions" in private_data:
        yield f"PrivateData={private_data}: nodes and partitions of others are hidden"
    for kind in kinds:
        if kind.node_type.gpus and (gpu_types := _describe_mixed_gpus(kind)):
            first_type = f"{kind.node_type.gpus.count} {kind.node_type.gpus.model}"
            message = f"a node has GPUs of several types ({gpu_types}); {first_type} is a guess"
            yield f"{names[kind.name]}: {message}"
        if not kind.usable:
            states = join_names(sorted({node.state for node in kind.nodes}), 3)
            counted_nodes = pluralize(len(kind.nodes), "node")
            yield f"none of the {counted_nodes} of {names[kind.name]} is available ({states})"
