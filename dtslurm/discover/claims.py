"""Compares the values of a cluster profile (its claims) with the discovered facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dtslurm.discover import from_probe
from dtslurm.discover.facts import DiscoveredCluster, join_names
from dtslurm.discover.kinds import Kind
from dtslurm.model.cluster import ClusterProfile, NodeType
from dtslurm.model.values import dataclass
from dtslurm.slurm.survey import Survey
from dtslurm.suggestions import suggest_name

Verdict = Literal["ok", "differs", "unknown"]
# Installed memory and the memory that firmware, kernel and driver leave may differ by this fraction.
_MEMORY_TOLERANCE = 0.08


@dataclass(frozen=True)
class Row:
    """The comparison of one claim.

    Attributes:
        what: the profile value that was compared.
        claim: the value in the profile.
        found: the discovered value, or "-".
        verdict: whether they agree.
        fails: whether a difference counts as a failure, or is only worth knowing.
    """

    what: str
    claim: str
    found: str
    verdict: Verdict
    fails: bool = True


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The discovered facts that claims are compared with.

    Attributes:
        survey: the survey of the login node.
        kinds: the groups of equal nodes.
        names: the profile's name of each kind.
        found: the discovered values.
        seen: the observations of probe jobs by node type.
    """

    survey: Survey
    kinds: Sequence[Kind]
    names: Mapping[str, str]
    found: DiscoveredCluster
    seen: Mapping[str, Mapping[str, Any]]


def judge(profile: ClusterProfile, evidence: Evidence) -> list[Row]:
    """Return a row for every claim that can be compared."""
    return [
        *_compare_version(profile, evidence.survey),
        *_compare_slurm_settings(profile, evidence),
        *_compare_partitions(profile, evidence),
        *_compare_node_types(profile, evidence),
        *_compare_fabric(profile, evidence),
        *_compare_environment(profile, evidence),
    ]


def _make_row(label: str, claim: object, observed: object, holds: bool | None) -> Row:
    verdict: Verdict = "unknown" if holds is None or observed is None else "ok" if holds else "differs"
    return Row(label, str(claim), "-" if observed is None else str(observed), verdict)


def _compare_version(profile: ClusterProfile, survey: Survey) -> Iterator[Row]:
    claim, discovered = profile.slurm.version, survey.version
    if claim:
        is_same = claim == discovered or discovered.startswith(f"{claim}.")
        verdict: Verdict = "unknown" if not discovered else "ok" if is_same else "differs"
        yield Row("slurm.version", claim, discovered or "-", verdict, fails=False)


# ---- Slurm ----


def _compare_slurm_settings(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    settings, survey = profile.slurm, evidence.survey
    partition_names = [partition.name for partition in survey.partitions]
    if settings.partition:
        for name in settings.partition.split(","):
            yield _make_row(
                "slurm.partition",
                name,
                name if name in partition_names else f"there are {join_names(partition_names)}",
                name in partition_names,
            )
    if settings.account:
        accounts = list(dict.fromkeys(association.account for association in survey.associations))
        holds = settings.account in accounts if accounts else None
        yield _make_row("slurm.account", settings.account, join_names(accounts) or None, holds)
    if settings.qos:
        yield _compare_qos("slurm.qos", settings.qos, survey)
    if settings.max_array_size:
        array_limit = survey.config.get("MaxArraySize")
        yield _make_row(
            "slurm.max_array_size",
            settings.max_array_size,
            array_limit,
            array_limit == str(settings.max_array_size),
        )
    if settings.mpi:
        offered_types = join_names(survey.offered, 10) or None
        yield _make_row("slurm.mpi", settings.mpi, offered_types, settings.mpi in survey.offered)
    if settings.constraint:
        yield _compare_constraint(
            "slurm.constraint", settings.constraint, [node for kind in evidence.kinds for node in kind.nodes]
        )


def _compare_qos(label: str, claim: str, survey: Survey) -> Row:
    available = sorted({name for association in survey.associations for name in association.qos})
    return _make_row(label, claim, join_names(available) or None, claim in available if available else None)


def _compare_constraint(label: str, claim: str, nodes: Sequence[Any]) -> Row:
    features = {feature for node in nodes for feature in node.features}
    requested_features = [
        word for word in re.split(r"[&|,()\[\]*!]+|\*\d+", claim) if word and not word.isdecimal()
    ]
    missing = [word for word in requested_features if word not in features]
    return _make_row(
        label,
        claim,
        f"no node has {join_names(missing)}" if missing else "some nodes have it",
        not missing if features else None,
    )


def _compare_partitions(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    partitions_by_name = {partition.name: partition for partition in evidence.survey.partitions}
    for name, claim in profile.slurm.partitions.items():
        label, live = f"partition {name}", partitions_by_name.get(name)
        if live is None:
            is_hidden = bool(
                {"partitions", "nodes"} & set(evidence.survey.config.get("PrivateData", "").split(","))
            )
            yield _make_row(
                label, "is there", None if is_hidden or not partitions_by_name else "not there", False
            )
            continue
        state = live.state or "UP"
        yield Row(label, "takes jobs", state, "ok" if state == "UP" else "differs")
        if claim.max_time:
            limit = str(live.max_time) if live.max_time else "no limit"
            holds = live.max_time is None or claim.max_time <= live.max_time
            yield _make_row(f"{label}, max_time", claim.max_time, limit, holds)
        max_nodes = min((number for number in (live.max_nodes, live.total_nodes) if number), default=None)
        if claim.max_nodes:
            yield _make_row(
                f"{label}, max_nodes",
                claim.max_nodes,
                max_nodes,
                max_nodes is not None and claim.max_nodes <= max_nodes,
            )
        if claim.qos:
            yield _compare_qos(f"{label}, qos", claim.qos, evidence.survey)
        if claim.node_type:
            node_types = [evidence.names[kind.name] for kind in evidence.kinds if _has_nodes_in(kind, name)]
            is_offered = claim.node_type in node_types if node_types else None
            yield _make_row(
                f"{label}, node_type", claim.node_type, join_names(node_types) or None, is_offered
            )


def _has_nodes_in(kind: Kind, partition: str) -> bool:
    return any(partition in node.partitions for node in kind.nodes)


# ---- Nodes ----


def _compare_node_types(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    by_name = {evidence.names[kind.name]: kind for kind in evidence.kinds}
    for name, claim in profile.node_types.items():
        kind = by_name.get(name) or _find_matching_kind(claim, evidence.kinds)
        if kind is None:
            gpu_text = f"{claim.gpu_count} x {claim.gpus.model}" if claim.gpus else "no GPUs"
            yield _make_row(f"node type {name}", gpu_text, None, None)
            continue
        yield from _compare_node_type(name, claim, kind, evidence.seen.get(name, {}))


def _find_matching_kind(claim: NodeType, kinds: Sequence[Kind]) -> Kind | None:
    """Return the only kind that the claimed type can mean by its partition, GPUs and CPUs, or None."""
    tests: tuple[Callable[[Kind], bool], ...] = (
        lambda kind: claim.partition is None or _has_nodes_in(kind, claim.partition),
        lambda kind: claim.gpu_count == kind.node_type.gpu_count,
        lambda kind: claim.schedulable_cpus in {None, kind.node_type.cpus},
    )
    candidates = list(kinds)
    for test in tests:
        candidates = [kind for kind in candidates if test(kind)] or candidates
    return candidates[0] if len(candidates) == 1 else None


def _compare_node_type(
    name: str, claim: NodeType, kind: Kind, observations: Mapping[str, Any]
) -> Iterator[Row]:
    discovered, label = kind.node_type, f"node type {name}"
    yield from _compare_gpus(label, claim, kind, observations)
    yield from _compare_size(label, claim, discovered)
    if claim.partition:
        holds = all(_has_nodes_in(kind, partition) for partition in claim.partition.split(","))
        yield _make_row(f"{label}, partition", claim.partition, join_names(kind.partitions), holds)
    if claim.constraint:
        yield _compare_constraint(f"{label}, constraint", claim.constraint, kind.nodes)
    if observations:
        yield from _compare_probed_node(label, claim, observations)


def _compare_gpus(label: str, claim: NodeType, kind: Kind, observations: Mapping[str, Any]) -> Iterator[Row]:
    discovered, gpus = kind.node_type, from_probe.rows(observations, "gpus")
    if claim.gpus is None:
        return
    yield _make_row(
        f"{label}, GPUs", claim.gpus.count, discovered.gpu_count, claim.gpus.count == discovered.gpu_count
    )
    if observations:
        visible = len(gpus) if gpus or observations.get("gpu_tools") else None
        yield _make_row(f"{label}, GPUs in a job", claim.gpus.count, visible, claim.gpus.count == visible)
    if claim.gpus.slurm_type:
        slurm_type = discovered.gpus.slurm_type if discovered.gpus else None
        yield _make_row(
            f"{label}, Slurm's GPU type",
            claim.gpus.slurm_type,
            slurm_type,
            claim.gpus.slurm_type == slurm_type,
        )
    if gpus:
        model = str(gpus[0].get("name") or "")
        yield _make_row(
            f"{label}, GPU", claim.gpus.model, model or None, _is_same_model(claim.gpus.model, model)
        )
        memory = int(gpus[0].get("memory_mib") or 0)
        if claim.gpus.memory:
            holds = _is_similar(claim.gpus.memory.mib, memory)
            yield _make_row(
                f"{label}, GPU memory", claim.gpus.memory, f"{memory}M" if memory else None, holds
            )


def _compare_size(label: str, claim: NodeType, live: NodeType) -> Iterator[Row]:
    for key in ("sockets", "cores_per_socket", "threads_per_core"):
        number = getattr(claim, key)
        if number is not None and live.sockets is not None and (key != "threads_per_core" or claim.sockets):
            yield _make_row(f"{label}, {key}", number, getattr(live, key), number == getattr(live, key))
    if claim.schedulable_cpus and live.cpus:
        yield _make_row(
            f"{label}, CPUs for jobs", claim.schedulable_cpus, live.cpus, claim.schedulable_cpus <= live.cpus
        )
    if claim.memory and live.memory:
        holds = claim.memory.mib <= live.memory.mib or _is_similar(claim.memory.mib, live.memory.mib)
        yield _make_row(f"{label}, memory", claim.memory, live.memory, holds)


def _is_same_model(claim: str, live_model: str) -> bool:
    """Return whether two names mean the same GPU: ``A100-SXM4-40GB`` and ``NVIDIA A100-PCIE-40GB``.

    The first word of the claim with a digit decides: form factor and memory have several spellings.
    """
    words, live_words = (re.findall(r"[a-z0-9]+", name.lower()) for name in (claim, live_model))
    model = next((word for word in words if re.search(r"\d", word)), words[0] if words else None)
    end_positions = range(len(live_words) + 1)
    # A live name may separate what the claim joins: "RTX 2080 Ti" for RTX2080Ti.
    return any(model == "".join(live_words[start:end]) for end in end_positions for start in range(end))


def _is_similar(first_size: int, second_size: int) -> bool:
    return abs(first_size - second_size) <= _MEMORY_TOLERANCE * max(first_size, second_size)


def _compare_probed_node(label: str, claim: NodeType, observations: Mapping[str, Any]) -> Iterator[Row]:
    links = observations.get("links") or {}
    if claim.intra_node:
        link_kind = links.get("kind")
        nvlink_kinds = {"nvlink", "nvswitch"}
        holds = link_kind == claim.intra_node.kind or {link_kind, claim.intra_node.kind} == nvlink_kinds
        yield _make_row(f"{label}, link between GPUs", claim.intra_node.kind, link_kind, holds)
    if claim.numa_nodes:
        yield _make_row(
            f"{label}, NUMA nodes",
            claim.numa_nodes,
            observations.get("numa_nodes"),
            claim.numa_nodes == observations.get("numa_nodes"),
        )
    ports = from_probe.select_active_ports(observations)
    if claim.nics and claim.nics.count:
        yield _make_row(
            f"{label}, network adapters",
            claim.nics.count,
            len(ports) if ports else None,
            claim.nics.count == len(ports),
        )
    if claim.local_disk:
        disk = next(
            (
                disk
                for disk in from_probe.rows(observations, "disks")
                if disk.get("path") == claim.local_disk.path
            ),
            None,
        )
        if disk is None:
            yield _make_row(
                f"{label}, local disk",
                claim.local_disk.path,
                "not a writable folder",
                None,
            )
        else:
            size = disk.get("size_mib") or 0
            claimed_size = claim.local_disk.size
            sharing_note = f"{disk.get('kind')}, shared by all nodes" if disk.get("shared") else ""
            holds = not sharing_note and (
                claimed_size is None or size >= claimed_size.mib * (1 - _MEMORY_TOLERANCE)
            )
            yield _make_row(
                f"{label}, local disk",
                f"{claim.local_disk.path} {claimed_size or ''}".strip(),
                sharing_note or f"{size}M",
                holds,
            )


# ---- Network and environment ----


def _compare_fabric(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    fabric, observations = profile.fabric, next(iter(evidence.seen.values()), {})
    if fabric is None or not observations:
        return
    detected = from_probe.fabric_kind(observations)
    kind = detected[0] if detected else None
    is_undecidable = kind == "ethernet" and fabric.kind in {"tcpx", "tcpxo", "gib", "loopback"}
    is_gib = fabric.kind == "gib" and kind == "roce"
    yield _make_row(
        "fabric.kind", fabric.kind, kind, None if is_undecidable else kind == fabric.kind or is_gib
    )
    up_ports = {str(port["name"]) for port in from_probe.select_active_ports(observations)}
    if fabric.hcas:
        missing = [name for name in fabric.hcas if name.split(":")[0] not in up_ports]
        yield _make_row(
            "fabric.hcas",
            join_names(fabric.hcas),
            f"not up: {join_names(missing)}" if missing else "all are up",
            not missing,
        )
    up_interfaces = {str(interface["name"]) for interface in from_probe.rows(observations, "interfaces")}
    if fabric.interfaces:
        missing = [name for name in fabric.interfaces if name not in up_interfaces]
        yield _make_row(
            "fabric.interfaces",
            join_names(fabric.interfaces),
            f"not up: {join_names(missing)}" if missing else "all are up",
            not missing,
        )
    rate = evidence.found.value("fabric", "rate_gbps")
    if fabric.rate_gbps:
        yield _make_row(
            "fabric.rate_gbps",
            f"{fabric.rate_gbps:g}",
            f"{rate:g}" if rate else None,
            rate == fabric.rate_gbps,
        )


def _compare_environment(profile: ClusterProfile, evidence: Evidence) -> Iterator[Row]:
    survey, observations = evidence.survey, next(iter(evidence.seen.values()), {})
    modules = set(survey.modules) | {name.partition("/")[0] for name in survey.modules}
    for name in profile.environment.modules:
        holds = name in modules if modules else None
        yield _make_row(
            "environment.modules",
            name,
            "listed by module avail" if holds else "not listed by module avail" if modules else None,
            holds,
        )
    runtime = profile.container.runtime
    if runtime != "none":
        available = list(
            dict.fromkeys(
                [*(["pyxis"] if survey.pyxis else []), *survey.runtimes, *observations.get("runtimes", [])]
            )
        )
        yield _make_row(
            "container.runtime",
            runtime,
            join_names(available) or None,
            runtime in available if available else None,
        )
    online = observations.get("online") or {}
    if profile.environment.offline and online:
        reachable = [host for host, answer in online.items() if answer]
        network_text = (
            f"{join_names(reachable)} can be reached" if reachable else "no external host can be reached"
        )
        yield _make_row("environment.offline", "true", network_text, not reachable)


def launcher(name: str, launchers: Sequence[str]) -> Row:
    """Return the row of the profile's default launcher."""
    availability = (
        "available" if name in launchers else f"unknown launcher{suggest_name(name, list(launchers))}"
    )
    return _make_row("default_launcher", name, availability, name in launchers)


def dry_run(label: str, launchers: Sequence[str], message: str, is_refused: bool | None) -> Row:
    """Return the row of a dry run of a submission.

    Args:
        label: the node type or partition of the dry run.
        launchers: the launchers whose script was submitted.
        message: sbatch's message.
        is_refused: whether Slurm refused the submission; None if it only refused it for the moment.
    """
    claim = f"accepts {join_names(launchers, 4)}"
    if is_refused is None:
        return Row(f"{label}, sbatch --test-only", claim, message, "unknown")
    return Row(
        f"{label}, sbatch --test-only", claim, message or "accepted", "differs" if is_refused else "ok"
    )


def bandwidth(expected_gbs: float | None, measured_gbs: float | None, message: str) -> Row:
    """Return the row of the fabric check.

    Args:
        expected_gbs: the expected bus bandwidth in GB/s, if the profile has one.
        measured_gbs: the measured bus bandwidth in GB/s; None if there was no measurement.
        message: the error message of the check, empty if it succeeded.
    """
    claim = (
        f"{expected_gbs:g} GB/s of bus bandwidth"
        if expected_gbs
        else "an all-reduce between two nodes succeeds"
    )
    if measured_gbs is None:
        return Row("fabric check", claim, message, "unknown")
    holds = not message and (expected_gbs is None or measured_gbs >= expected_gbs / 2)
    return Row("fabric check", claim, message or f"{measured_gbs:.3g} GB/s", "ok" if holds else "differs")
