"""A profile's claims beside what was found: whether each holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dtslurm.discover import from_probe
from dtslurm.discover.facts import DiscoveredCluster, listed
from dtslurm.discover.kinds import Kind
from dtslurm.discover.sites import plain
from dtslurm.model.cluster import ClusterProfile, NodeType
from dtslurm.model.values import dataclass
from dtslurm.slurm.survey import Survey
from dtslurm.suggestions import suggest_name

Verdict = Literal["ok", "differs", "unknown"]
_LIKE = 0.08  # of memory: what is built in, and what firmware, kernel and driver leave


@dataclass(frozen=True)
class Row:
    """One claim and what was found; ``fails`` is false where a difference is only worth knowing."""

    what: str
    claim: str
    found: str
    verdict: Verdict
    fails: bool = True


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What claims are held against.

    Attributes:
        names: each kind's name in the profile.
        found: values that were found.
        seen: what probes saw, by node type.
    """

    survey: Survey
    kinds: Sequence[Kind]
    names: Mapping[str, str]
    found: DiscoveredCluster
    seen: Mapping[str, Mapping[str, Any]]


def judge(profile: ClusterProfile, evidence: Evidence) -> list[Row]:
    """Return every claim that can be looked at, with the verdict."""
    return [
        *_version(profile, evidence.survey),
        *_customs(profile, evidence),
        *_partitions(profile, evidence),
        *_node_types(profile, evidence),
        *_fabric(profile, evidence),
        *_surroundings(profile, evidence),
    ]


def _row(what: str, claim: object, found: object, holds: bool | None) -> Row:
    verdict: Verdict = "unknown" if holds is None or found is None else "ok" if holds else "differs"
    return Row(what, str(claim), "-" if found is None else str(found), verdict)


def _version(profile: ClusterProfile, survey: Survey) -> Iterator[Row]:
    claim, found = profile.slurm.version, survey.version
    if claim:
        same = claim == found or found.startswith(f"{claim}.")
        verdict: Verdict = "unknown" if not found else "ok" if same else "differs"
        yield Row("slurm.version", claim, found or "-", verdict, fails=False)


# ---- Slurm ----


def _customs(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    customs, survey = profile.slurm, evidence.survey
    known = [one.name for one in survey.partitions]
    if customs.partition:
        for name in customs.partition.split(","):
            yield _row(
                "slurm.partition",
                name,
                name if name in known else f"there are {listed(known)}",
                name in known,
            )
    if customs.account:
        accounts = list(dict.fromkeys(one.account for one in survey.associations))
        holds = customs.account in accounts if accounts else None
        yield _row("slurm.account", customs.account, listed(accounts) or None, holds)
    if customs.qos:
        yield _qos("slurm.qos", customs.qos, survey)
    if customs.max_array_size:
        size = survey.config.get("MaxArraySize")
        yield _row("slurm.max_array_size", customs.max_array_size, size, size == str(customs.max_array_size))
    if customs.mpi:
        offered = listed(survey.offered, 10) or None
        yield _row("slurm.mpi", customs.mpi, offered, customs.mpi in survey.offered)
    if customs.constraint:
        yield _constraint(
            "slurm.constraint", customs.constraint, [node for kind in evidence.kinds for node in kind.nodes]
        )


def _qos(what: str, claim: str, survey: Survey) -> Row:
    qos = sorted({name for one in survey.associations for name in one.qos})
    return _row(what, claim, listed(qos) or None, claim in qos if qos else None)


def _constraint(what: str, claim: str, nodes: Sequence[Any]) -> Row:
    features = {feature for node in nodes for feature in node.features}
    wanted = [word for word in re.split(r"[&|,()\[\]*!]+|\*\d+", claim) if word and not word.isdecimal()]
    missing = [word for word in wanted if word not in features]
    return _row(
        what,
        claim,
        f"no node has {listed(missing)}" if missing else "nodes have it",
        not missing if features else None,
    )


def _partitions(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    live = {one.name: one for one in evidence.survey.partitions}
    for name, claim in profile.slurm.partitions.items():
        what, found = f"partition {name}", live.get(name)
        if found is None:
            private = bool(
                {"partitions", "nodes"} & set(evidence.survey.config.get("PrivateData", "").split(","))
            )
            yield _row(what, "is there", None if private or not live else "not there", False)
            continue
        state = found.state or "UP"
        yield Row(what, "takes jobs", state, "ok" if state == "UP" else "differs")
        if claim.max_time:
            limit = str(found.max_time) if found.max_time else "no limit"
            holds = found.max_time is None or claim.max_time <= found.max_time
            yield _row(f"{what}, max_time", claim.max_time, limit, holds)
        most = min((number for number in (found.max_nodes, found.total_nodes) if number), default=None)
        if claim.max_nodes:
            yield _row(
                f"{what}, max_nodes", claim.max_nodes, most, most is not None and claim.max_nodes <= most
            )
        if claim.qos:
            yield _qos(f"{what}, qos", claim.qos, evidence.survey)
        if claim.node_type:
            types = [evidence.names[kind.name] for kind in evidence.kinds if _inside(kind, name)]
            among = claim.node_type in types if types else None
            yield _row(f"{what}, node_type", claim.node_type, listed(types) or None, among)


def _inside(kind: Kind, partition: str) -> bool:
    return any(partition in node.partitions for node in kind.nodes)


# ---- Nodes ----


def _node_types(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    by_name = {evidence.names[kind.name]: kind for kind in evidence.kinds}
    for name, claim in profile.node_types.items():
        kind = by_name.get(name) or _like(claim, evidence.kinds)
        if kind is None:
            what = f"{claim.gpu_count} x {claim.gpus.model}" if claim.gpus else "no GPUs"
            yield _row(f"node type {name}", what, None, None)
            continue
        yield from _node_type(name, claim, kind, evidence.seen.get(name, {}))


def _like(claim: NodeType, kinds: Sequence[Kind]) -> Kind | None:
    """Return the one kind that a claimed type can mean: by its partition, its GPUs, its CPUs."""
    tests: tuple[Callable[[Kind], bool], ...] = (
        lambda kind: claim.partition is None or _inside(kind, claim.partition),
        lambda kind: claim.gpu_count == kind.node_type.gpu_count,
        lambda kind: claim.schedulable_cpus in {None, kind.node_type.cpus},
    )
    left = list(kinds)
    for test in tests:
        left = [kind for kind in left if test(kind)] or left
    return left[0] if len(left) == 1 else None


def _node_type(name: str, claim: NodeType, kind: Kind, seen: Mapping[str, Any]) -> Iterator[Row]:
    live, what = kind.node_type, f"node type {name}"
    yield from _gpus(what, claim, kind, seen)
    yield from _size(what, claim, live)
    if claim.partition:
        holds = all(_inside(kind, one) for one in claim.partition.split(","))
        yield _row(f"{what}, partition", claim.partition, listed(kind.partitions), holds)
    if claim.constraint:
        yield _constraint(f"{what}, constraint", claim.constraint, kind.nodes)
    if seen:
        yield from _inside_node(what, claim, seen)


def _gpus(what: str, claim: NodeType, kind: Kind, seen: Mapping[str, Any]) -> Iterator[Row]:
    live, gpus = kind.node_type, from_probe.rows(seen, "gpus")
    if claim.gpus is None:
        return
    yield _row(f"{what}, GPUs", claim.gpus.count, live.gpu_count, claim.gpus.count == live.gpu_count)
    if seen:
        here = len(gpus) if gpus or seen.get("gpu_tools") else None
        yield _row(f"{what}, GPUs in a job", claim.gpus.count, here, claim.gpus.count == here)
    if claim.gpus.slurm_type:
        kind_of = live.gpus.slurm_type if live.gpus else None
        yield _row(
            f"{what}, Slurm's name of GPUs",
            claim.gpus.slurm_type,
            kind_of,
            claim.gpus.slurm_type == kind_of,
        )
    if gpus:
        model = str(gpus[0].get("name") or "")
        yield _row(f"{what}, GPU", claim.gpus.model, model or None, _same_model(claim.gpus.model, model))
        memory = int(gpus[0].get("memory_mib") or 0)
        if claim.gpus.memory:
            near = _near(claim.gpus.memory.mib, memory)
            yield _row(f"{what}, GPU memory", claim.gpus.memory, f"{memory}M" if memory else None, near)


def _size(what: str, claim: NodeType, live: NodeType) -> Iterator[Row]:
    for key in ("sockets", "cores_per_socket", "threads_per_core"):
        number = getattr(claim, key)
        if number is not None and live.sockets is not None and (key != "threads_per_core" or claim.sockets):
            yield _row(f"{what}, {key}", number, getattr(live, key), number == getattr(live, key))
    if claim.schedulable_cpus and live.cpus:
        yield _row(
            f"{what}, CPUs for jobs", claim.schedulable_cpus, live.cpus, claim.schedulable_cpus <= live.cpus
        )
    if claim.memory and live.memory:
        holds = claim.memory.mib <= live.memory.mib or _near(claim.memory.mib, live.memory.mib)
        yield _row(f"{what}, memory", claim.memory, live.memory, holds)


def _same_model(claim: str, found: str) -> bool:
    """Whether two names of a GPU mean one chip: ``A100-SXM4-40GB`` and ``NVIDIA A100-SXM4-40GB``."""
    words = [word for word in re.split(r"[^a-z0-9]+", claim.lower()) if word]
    return bool(words) and words[0] in plain(found) and bool(found)


def _near(one: int, other: int) -> bool:
    return abs(one - other) <= _LIKE * max(one, other)


def _inside_node(what: str, claim: NodeType, seen: Mapping[str, Any]) -> Iterator[Row]:
    links = seen.get("links") or {}
    if claim.intra_node:
        found = links.get("kind")
        wide = {"nvlink", "nvswitch"}
        holds = found == claim.intra_node.kind or {found, claim.intra_node.kind} == wide
        yield _row(f"{what}, link between GPUs", claim.intra_node.kind, found, holds)
    if claim.numa_nodes:
        yield _row(
            f"{what}, NUMA nodes",
            claim.numa_nodes,
            seen.get("numa_nodes"),
            claim.numa_nodes == seen.get("numa_nodes"),
        )
    ports = from_probe.active(seen)
    if claim.nics and claim.nics.count:
        yield _row(
            f"{what}, network adapters",
            claim.nics.count,
            len(ports) if ports else None,
            claim.nics.count == len(ports),
        )
    if claim.local_disk:
        disk = next(
            (one for one in from_probe.rows(seen, "disks") if one.get("path") == claim.local_disk.path), None
        )
        if disk is None:
            yield _row(
                f"{what}, local disk",
                claim.local_disk.path,
                "not among the folders that can be written to",
                None,
            )
        else:
            size = disk.get("size_mib") or 0
            claimed = claim.local_disk.size
            shared = f"{disk.get('kind')}, which nodes share" if disk.get("shared") else ""
            holds = not shared and (claimed is None or size >= claimed.mib * (1 - _LIKE))
            yield _row(
                f"{what}, local disk",
                f"{claim.local_disk.path} {claimed or ''}".strip(),
                shared or f"{size}M",
                holds,
            )


# ---- Around ----


def _fabric(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    fabric, seen = profile.fabric, next(iter(evidence.seen.values()), {})
    if fabric is None or not seen:
        return
    told = from_probe.fabric_kind(seen)
    kind = told[0] if told else None
    unsure = kind == "ethernet" and fabric.kind in {"tcpx", "tcpxo", "gib", "loopback"}
    gib = fabric.kind == "gib" and kind == "roce"
    yield _row("fabric.kind", fabric.kind, kind, None if unsure else kind == fabric.kind or gib)
    ports = {str(one["name"]) for one in from_probe.active(seen)}
    if fabric.hcas:
        missing = [name for name in fabric.hcas if name.split(":")[0] not in ports]
        yield _row(
            "fabric.hcas",
            listed(fabric.hcas),
            f"not up: {listed(missing)}" if missing else "all are up",
            not missing,
        )
    here = {str(one["name"]) for one in from_probe.rows(seen, "interfaces")}
    if fabric.interfaces:
        missing = [name for name in fabric.interfaces if name not in here]
        yield _row(
            "fabric.interfaces",
            listed(fabric.interfaces),
            f"not up: {listed(missing)}" if missing else "all are up",
            not missing,
        )
    rate = evidence.found.value("fabric", "rate_gbps")
    if fabric.rate_gbps:
        yield _row(
            "fabric.rate_gbps",
            f"{fabric.rate_gbps:g}",
            f"{rate:g}" if rate else None,
            rate == fabric.rate_gbps,
        )


def _surroundings(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    survey, seen = evidence.survey, next(iter(evidence.seen.values()), {})
    modules = set(survey.modules) | {name.partition("/")[0] for name in survey.modules}
    for name in profile.environment.modules:
        holds = name in modules if modules else None
        yield _row(
            "environment.modules",
            name,
            "module avail has it" if holds else "not in module avail" if modules else None,
            holds,
        )
    runtime = profile.container.runtime
    if runtime != "none":
        there = list(
            dict.fromkeys([*(["pyxis"] if survey.pyxis else []), *survey.runtimes, *seen.get("runtimes", [])])
        )
        yield _row("container.runtime", runtime, listed(there) or None, runtime in there if there else None)
    online = seen.get("online") or {}
    if profile.environment.offline and online:
        reached = [host for host, answer in online.items() if answer]
        words = f"{listed(reached)} could be reached" if reached else "nothing outside could be reached"
        yield _row("environment.offline", "true", words, not reached)


def launcher(name: str, known: Sequence[str]) -> Row:
    """Return the row of the launcher that jobs take which name none."""
    found = "is there" if name in known else f"no such launcher here{suggest_name(name, list(known))}"
    return _row("default_launcher", name, found, name in known)


def dry_run(where: str, launchers: Sequence[str], said: str, refused: bool | None) -> Row:
    """Return the row of a dry submission; ``refused`` is None where Slurm only says "not now"."""
    claim = f"takes {listed(launchers, 4)}"
    if refused is None:
        return Row(f"{where}, sbatch --test-only", claim, said, "unknown")
    return Row(f"{where}, sbatch --test-only", claim, said or "it does", "differs" if refused else "ok")


def bandwidth(expected: float | None, measured: float | None, said: str) -> Row:
    """Return the row of the fabric check."""
    claim = f"{expected:g} GB/s of bus bandwidth" if expected else "ranks of two nodes reduce together"
    if measured is None:
        return Row("fabric check", claim, said, "unknown")
    holds = not said and (expected is None or measured >= expected / 2)
    return Row("fabric check", claim, said or f"{measured:.3g} GB/s", "ok" if holds else "differs")
