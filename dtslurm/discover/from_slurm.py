"""What Slurm and the login node say, as values of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dtslurm.discover.facts import DiscoveredCluster, Fact, Sure, listed
from dtslurm.discover.kinds import Kind, gpu_memory, own_features
from dtslurm.model.cluster import ClusterProfile, Gpus
from dtslurm.model.units import pluralize
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
_SHOWN_MODULES = 12
_RUNTIMES = {
    "apptainer": "apptainer",
    "singularity": "singularity",
    "podman-hpc": "podman-hpc",
    "shifter": "shifter",
}
_SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "FASTSCRATCH")


def found(survey: Survey, kinds: Sequence[Kind], parent: ClusterProfile | None = None) -> DiscoveredCluster:
    """Return what the answers tell; node types are called as those of ``parent`` that are like them."""
    names = names_of(kinds, parent)
    facts = [
        *_customs(survey, kinds),
        *_partitions(survey, kinds, names),
        *_nodes(survey, kinds, names),
        *_place(survey),
    ]
    return DiscoveredCluster(
        tuple(facts), dict(_remarks(survey, kinds, names)), tuple(_notices(survey, kinds, names))
    )


def names_of(kinds: Sequence[Kind], parent: ClusterProfile | None) -> dict[str, str]:
    """Return what each kind is called in the profile: as the one like it of ``parent``'s, if any."""
    names = {kind.name: kind.name for kind in kinds}
    for kind in kinds:
        like = [name for name, own in parent.node_types.items() if _alike(kind, own.gpus)] if parent else []
        also = [other for other in kinds if other is not kind and like and _same_gpus(kind, other)]
        if len(like) == 1 and not also:
            names[kind.name] = like[0]
    taken = Counter(names.values())
    return {own: name if taken[name] == 1 else own for own, name in names.items()}


def _same_gpus(one: Kind, other: Kind) -> bool:
    a, b = one.node_type.gpus, other.node_type.gpus
    return a is not None and b is not None and (a.model, a.count, a.memory) == (b.model, b.count, b.memory)


def _alike(kind: Kind, own: Gpus | None) -> bool:
    gpus = kind.node_type.gpus
    if gpus is None or own is None or gpus.count != own.count:
        return False
    if gpus.memory and own.memory and gpus.memory != own.memory:
        return False
    if gpus.slurm_type is None:
        return True
    return gpus.slurm_type == own.slurm_type or gpus.model.lower() in own.model.lower()


# ---- Customs ----


def _customs(survey: Survey, kinds: Sequence[Kind]) -> Iterator[Fact]:
    config = survey.config

    def fact(key: str, value: str | int | bool | tuple[str, ...], evidence: str, sure: Sure = "sure") -> Fact:
        return Fact(("slurm", key), value, evidence, sure)

    if survey.version:
        yield fact("version", survey.version, _CONFIG)
    accounts = list(dict.fromkeys(one.account for one in survey.associations))
    if len(accounts) == 1:
        yield fact("account", accounts[0], "sacctmgr: your only account")
    default = [one.name for one in survey.partitions if one.default]
    if default:
        yield fact("partition", default[0], f"{_PARTITION}: Default=YES")
    yield from _gpu_request(survey, kinds)
    if survey.partitions and all(one.exclusive for one in survey.partitions):
        yield fact("exclusive", True, f"{_PARTITION}: OverSubscribe=EXCLUSIVE in all of them")
    elif config.get("SelectType") == "select/linear":
        yield fact("exclusive", True, f"{_CONFIG}: SelectType=select/linear gives whole nodes")
    size = config.get("MaxArraySize", "")
    if size.isdecimal() and int(size) > 0:
        yield fact("max_array_size", int(size), f"{_CONFIG}: MaxArraySize")
    codes = config.get("RequeueExit", "")
    if codes and all(code.strip().isdecimal() and 0 < int(code) < 256 for code in codes.split(",")):
        words = tuple(code.strip() for code in codes.split(","))
        yield fact("requeue_exit_codes", words, f"{_CONFIG}: RequeueExit")
    default_mpi = config.get("MpiDefault", "")
    if default_mpi in {"", "none"} and "pmix" in survey.offered:
        yield fact("mpi", "pmix", f"srun --mpi=list: {listed(survey.offered)}; MpiDefault is none", "likely")


def _gpu_request(survey: Survey, kinds: Sequence[Kind]) -> Iterator[Fact]:
    """Tell the form of GPU requests, which follows from the selector and from how GPUs are named."""
    key, select = ("slurm", "gpu_request"), survey.config.get("SelectType", "")
    with_gpus = [kind for kind in kinds if kind.node_type.gpus]
    if not with_gpus:
        return
    mixed = [partition for partition in survey.partitions if len(_gpu_types(partition, with_gpus)) > 1]
    inside = [kind for kind in with_gpus if any(_has(kind, one.name) for one in mixed)]
    typed = "-typed" if any(_type(kind) for kind in inside) else ""
    why = f"Gres: GPUs of several types in {listed(one.name for one in mixed)}; " if typed else ""
    if select and "cons_tres" not in select:
        yield Fact(key, f"gres{typed}", f"{why}{_CONFIG}: {select} knows no --gpus-per-node")
    else:
        yield Fact(key, f"gpus-per-node{typed}", f"{why}{_CONFIG}: {select or 'no SelectType'}", "likely")


def _type(kind: Kind) -> str | None:
    return kind.node_type.gpus.slurm_type if kind.node_type.gpus else None


def _gpu_types(partition: PartitionInfo, kinds: Sequence[Kind]) -> set[str]:
    nodes = (node for kind in kinds for node in kind.nodes if partition.name in node.partitions)
    return {name for node in nodes for name in gpu_counts(node)}


def _several_types(kind: Kind) -> str:
    """Return the types of GPUs of a node that has several: ``1 a100, 3 1g.10gb``; empty where none has."""
    mixed = next((counts for node in kind.nodes if len(counts := gpu_counts(node)) > 1), {})
    return listed(f"{number} {name or 'without a type'}" for name, number in mixed.items())


def _has(kind: Kind, partition: str) -> bool:
    return any(partition in node.partitions for node in kind.nodes)


def _partitions(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[Fact]:
    for one in survey.partitions:
        above = ("slurm", "partitions", one.name)
        if one.max_time is not None:
            yield Fact((*above, "max_time"), str(one.max_time), f"{_PARTITION}: MaxTime")
        most = [number for number in (one.max_nodes, one.total_nodes) if number]
        if most:
            word = "MaxNodes" if one.max_nodes and one.max_nodes == min(most) else "TotalNodes"
            yield Fact((*above, "max_nodes"), min(most), f"{_PARTITION}: {word}")
        inside = [kind for kind in kinds if _has(kind, one.name)]
        if len(inside) == 1:
            yield Fact((*above, "node_type"), names[inside[0].name], f"{survey.by}: all its nodes are alike")
        notes = _notes(one, inside, names)
        if notes:
            yield Fact((*above, "note"), "; ".join(notes), _PARTITION)


def _notes(one: PartitionInfo, inside: Sequence[Kind], names: dict[str, str]) -> list[str]:
    notes = []
    if one.state not in {"UP", ""}:
        notes.append(f"its state was {one.state}")
    if len(inside) > 1:
        kinds = (
            f"{sum(one.name in node.partitions for node in kind.nodes):,} {names[kind.name]}"
            for kind in inside
        )
        notes.append(f"nodes differ: {listed(kinds)}")
    for word, allowed in (("accounts", one.allow_accounts), ("QOS", one.allow_qos)):
        if allowed:
            notes.append(f"for {word} {listed(allowed)}")
    return notes


# ---- Nodes ----


def _nodes(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[Fact]:
    default = next((one.name for one in survey.partitions if one.default), None)
    for kind in kinds:
        yield from _node_type(survey, kind, names[kind.name], default)
    if len(kinds) > 1:
        inside = [kind for kind in kinds if default and _has(kind, default)] or list(kinds)
        best = max(inside, key=lambda kind: (kind.node_type.gpu_count > 0, len(kind.nodes)))
        words = "GPU nodes" if best.node_type.gpus else "nodes"
        where = f" of partition {default}" if inside[0] in kinds and default else ""
        evidence = f"most of the {words}{where}"
        yield Fact(("default_node_type",), names[best.name], evidence, "guess")


def _node_type(survey: Survey, kind: Kind, name: str, default: str | None) -> Iterator[Fact]:
    own, above = kind.node_type, ("node_types", name)
    many = f"{survey.by}: {pluralize(len(kind.nodes), 'node')}"

    def fact(key: str, value: str | int, evidence: str, sure: Sure = "sure") -> Fact:
        return Fact((*above, *key.split(".")), value, evidence, sure)

    if kind.partitions:
        partition = default if default in kind.partitions else kind.partitions[0]
        others = f", as in {listed(one for one in kind.partitions if one != partition)}"
        yield fact("partition", partition, many + (others if len(kind.partitions) > 1 else ""), "likely")
    if own.gpus:
        several = _several_types(kind)
        gres = f"Gres: {several}" if several else "Gres"
        yield fact("gpus.model", own.gpus.model, f"{many}, Gres", "guess" if several else "likely")
        yield fact("gpus.count", own.gpus.count, gres, "guess" if several else "sure")
        if own.gpus.memory:
            features = [one for one in kind.nodes[0].features if gpu_memory([one])]
            yield fact("gpus.memory", str(own.gpus.memory), f"feature {listed(features)}", "likely")
        if own.gpus.slurm_type:
            yield fact("gpus.slurm_type", own.gpus.slurm_type, "Gres")
        yield fact("gpus.vendor", own.gpus.vendor, "the GPU's name in Gres", "guess")
    if own.sockets and own.cores_per_socket:
        yield fact("sockets", own.sockets, many)
        yield fact("cores_per_socket", own.cores_per_socket, survey.by)
        yield fact("threads_per_core", min(own.threads_per_core, 8), survey.by)
    if own.cpus:
        yield fact("cpus", own.cpus, f"{survey.by}: what jobs may use")
    if own.memory:
        yield fact("memory", str(own.memory), f"{survey.by}: RealMemory, the least of them")
    features = own_features(kind, survey.nodes) if _shares(kind, survey.nodes) else []
    if features:
        yield fact("constraint", features[0], "a feature of these nodes alone in their partitions", "likely")


def _shares(kind: Kind, nodes: Sequence[NodeInfo]) -> bool:
    """Whether a kind's partitions hold other nodes, so that the partition alone does not choose it."""
    mine, partitions = {node.name for node in kind.nodes}, set(kind.partitions)
    return any(node.name not in mine and partitions.intersection(node.partitions) for node in nodes)


# ---- The rest ----


def _place(survey: Survey) -> Iterator[Fact]:
    for variable in _SCRATCH:
        folder = next((one for one in survey.folders if one.variable == variable), None)
        if folder:
            size = f", {folder.kind} of {folder.size / 2**30:,.1f} TiB" if folder.size else ""
            yield Fact(("paths", "scratch"), f"${variable}", f"login shell: {folder.path}{size}", "likely")
            break
    if survey.pyxis:
        yield Fact(("container", "runtime"), "pyxis", "srun --help has --container-image")
        return
    here = [_RUNTIMES[name] for name in survey.runtimes if name in _RUNTIMES]
    if here:
        yield Fact(("container", "runtime"), here[0], "on the login node's PATH", "likely")


def _remarks(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    accounts = list(dict.fromkeys(one.account for one in survey.associations))
    if len(accounts) > 1:
        yield "slurm", [f"account: you have {listed(accounts, 12)} (sacctmgr); write the one to use"]
    for kind in kinds:
        out = len(kind.nodes) - len(kind.usable)
        lines = [f"{pluralize(len(kind.nodes), 'node')}: {listed((node.name for node in kind.nodes), 3)}"]
        if out:
            lines.append(f"{out:,} of them could not be used just then")
        yield f"node_types.{names[kind.name]}", lines
    useful = [name for name in survey.modules if any(word in name.lower() for word in _USEFUL_MODULES)]
    if useful:
        yield "environment", [f"modules there are: {listed(useful, _SHOWN_MODULES)}"]
    places = [
        f"{one.variable}={one.path}"
        + (
            f" ({one.kind}, {one.free / 2**20:,.0f} GiB free of {one.size / 2**20:,.0f})"
            if one.size and one.free is not None
            else ""
        )
        for one in survey.folders
    ]
    if places:
        yield "paths", places


def _notices(survey: Survey, kinds: Sequence[Kind], names: dict[str, str]) -> Iterator[str]:
    for name in survey.silent:
        words = survey.silent[name]
        if name == "associations":
            yield f"accounting told nothing, so accounts and QOS are not known ({words})"
        else:
            yield f"Slurm told nothing of its {name} ({words})"
    private = survey.config.get("PrivateData", "")
    if "nodes" in private or "partitions" in private:
        yield f"PrivateData={private}: nodes and partitions that are not yours are not seen"
    for kind in kinds:
        if kind.node_type.gpus and (several := _several_types(kind)):
            taken = f"{kind.node_type.gpus.count} {kind.node_type.gpus.model}"
            yield f"{names[kind.name]}: a node has GPUs of several types ({several}); {taken} is a guess"
        if not kind.usable:
            states = listed(sorted({node.state for node in kind.nodes}), 3)
            many = pluralize(len(kind.nodes), "node")
            yield f"none of the {many} of {names[kind.name]} can be used now ({states})"
