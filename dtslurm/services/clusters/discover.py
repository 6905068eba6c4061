"""Writes a profile from a cluster's own data: one command on its login node, and a few probe jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dtslurm.config import profiles
from dtslurm.discover import from_probe, from_slurm, page, sites
from dtslurm.discover.facts import DiscoveredCluster, Fact, join_names, text_of
from dtslurm.discover.kinds import Kind, kinds
from dtslurm.errors import RequestInvalid, SlurmUnavailable
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import choose_destination, split_names
from dtslurm.model.jobs.options import Placement
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.services.clusters.probing import Probe, Target, probe
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import survey as surveys
from dtslurm.slurm.survey import Survey
from dtslurm.store import codec

_COMMAND_LIMIT_S = 20
_MAX_PROBES = 3
_PROBE_TIME = Walltime(300)
_PROBE_MEMORY = Memory(4096)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The discovered facts about a cluster, and the profile that states them.

    Attributes:
        name: the name that the profile may get.
        extends: the profile that the new one extends and completes; None if it stands alone.
        survey: the login node's answers.
        kinds: the groups of equal nodes.
        names: the node type's name, by the name of the group.
        found: the discovered values.
        probes: the results of the probe jobs.
        text: the profile's text.
    """

    name: str
    extends: str | None
    survey: Survey
    kinds: tuple[Kind, ...]
    names: Mapping[str, str]
    found: DiscoveredCluster
    probes: tuple[Probe, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class DiscoverOptions:
    """The options of discovery.

    Attributes:
        partitions: probe only nodes of these partitions; empty for all.
        probe: run probe jobs.
        fabric: run a job on two nodes that measures the network between them.
        account, qos: for the probe jobs.
        wait_s: how long probe jobs may wait for their start.
        extends: the profile to complete, if the user has chosen one.
    """

    partitions: tuple[str, ...] = ()
    probe: bool = True
    fabric: bool = True
    account: str | None = None
    qos: str | None = None
    wait_s: float = 120.0
    extends: str | None = None


def survey_cluster(cluster: ActiveCluster) -> Survey:
    """Return the login node's answers: one command, at most 5 requests to slurmctld.

    Raises:
        RequestInvalid: there is no Slurm.
        SlurmUnavailable: Slurm does not answer.
        TransportError: the login node cannot be reached.
    """
    pythons = [
        name for name in (cluster.profile.login.python, "python3", "/usr/libexec/platform-python") if name
    ]
    answer = cluster.transport.run(
        surveys.build_survey_command(_COMMAND_LIMIT_S, pythons), timeout=6 * _COMMAND_LIMIT_S
    )
    survey = surveys.read(answer.stdout)
    host = cluster.transport.host
    if "scontrol" in survey.missing and "sinfo" in survey.missing:
        raise RequestInvalid(
            [f"{host} has no Slurm: neither scontrol nor sinfo is on PATH"],
            hint="check that PATH is also set for non-login shells, in which ssh runs commands; dtslurm "
            "does not support PBS, LSF and AGE",
        )
    if not survey.nodes and not survey.partitions and not survey.config:
        errors = [f"{name}: {words}" for name, words in survey.silent.items()]
        raise SlurmUnavailable(
            f"Slurm on {host} reported no nodes, no partitions and no configuration",
            evidence=errors or answer.stderr.splitlines()[-5:],
            hint=f"check that sinfo works on {host}",
        )
    return survey


def discover(
    context: Context,
    cluster: ActiveCluster,
    options: DiscoverOptions,
    *,
    host: str | None = None,
    own_path: Path | None = None,
    report_progress: Say = lambda _: None,
) -> Discovery:
    """Discover the facts about a cluster, and write its profile as text.

    Args:
        context: the environment and the clock.
        cluster: the cluster.
        options: what to probe, and how.
        host: the login node as the user names it, None for this machine.
        own_path: the file that will be written.
        report_progress: receives progress messages.

    Raises:
        RequestInvalid, SlurmUnavailable, TransportError: see `survey_cluster`; or there is no such partition.
    """
    survey = survey_cluster(cluster)
    partition_names = {partition.name for partition in survey.partitions} | {
        name for node in survey.nodes for name in node.partitions
    }
    unknown_names = [name for name in options.partitions if name not in partition_names]
    if unknown_names:
        raise RequestInvalid(
            [
                (
                    f"there is no partition {join_names(unknown_names)}; "
                    f"available: {join_names(sorted(partition_names), 20)}"
                )
            ]
        )
    hosts = [survey.host, host or "", cluster.profile.login.host or ""]
    candidates = [] if options.extends else _match_known_sites(context, survey, hosts)
    parent_name = options.extends or (candidates[0][0] if len(candidates) == 1 else None)
    parent = _load_parent(context, parent_name, own_path) if parent_name else None
    groups = kinds(survey.nodes)
    names = from_slurm.names_of(groups, parent)
    discovered = from_slurm.facts_from_survey(survey, groups, parent)
    probes: tuple[Probe, ...] = ()
    if options.probe:
        probes, probe_facts = probe_node_types(context, cluster, survey, options, parent, report_progress)
        discovered += probe_facts
    discovered = _login(host, survey, parent) + discovered if host else discovered
    discovered = (
        _head(survey, context) + discovered if parent is None else _select_new_facts(discovered, parent)
    )
    name = parent_name or sites.profile_name(survey.cluster, host)
    head = _comments(context, survey, host, candidates, parent_name)
    text = page.text(discovered, head=head, extends=parent_name)
    return Discovery(
        name=name, extends=parent_name, survey=survey, kinds=tuple(groups), names=names, found=discovered,
        probes=probes, text=text,
    )  # fmt: skip


# ---- Known sites ----


def _match_known_sites(context: Context, survey: Survey, hosts: Sequence[str]) -> list[tuple[str, str]]:
    profiles_by_name: dict[str, ClusterProfile] = {}
    for path in sorted(profiles.packaged().glob("*.yaml")):
        profiles_by_name[path.stem] = profiles.load(str(path), cwd=context.cwd, env=context.env).profile
    sample_nodes = [group[len(group) // 2].name for group in (survey.nodes[:1], survey.nodes[-1:]) if group]
    return sites.find_matching_profiles(profiles_by_name, survey.cluster, hosts, sample_nodes)


def _load_parent(context: Context, name: str, own_path: Path | None) -> ClusterProfile:
    """Return the profile to complete; never the file that is about to be written."""
    if own_path is not None and profiles.find(name, cwd=context.cwd, env=context.env) == own_path:
        name = str(profiles.packaged() / f"{name}.yaml")
    return profiles.load(name, cwd=context.cwd, env=context.env).profile


def _select_new_facts(cluster: DiscoveredCluster, parent: ClusterProfile) -> DiscoveredCluster:
    """Return facts that the site's profile lacks, and certain ones that contradict it, with its value."""
    profile_values = dict(iterate_values(codec.plain(parent)))
    facts = []
    for fact in cluster.facts:
        profile_value = profile_values.get(fact.key)
        if profile_value is None:
            facts.append(fact)
        elif fact.sure == "sure" and not means_same(profile_value, fact):
            facts.append(replace(fact, evidence=f"{fact.evidence} (profile {parent.name}: {profile_value})"))
    return replace(cluster, facts=tuple(facts))


def iterate_values(
    values: Mapping[str, Any], parent_keys: tuple[str, ...] = ()
) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (key, text) for every value that a profile sets."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from iterate_values(value, (*parent_keys, key))
        elif isinstance(value, list):
            if value:
                yield (*parent_keys, key), text_of(tuple(map(str, value)))
        elif value is not None:
            yield (*parent_keys, key), text_of(value)


def means_same(profile_text: str, fact: Fact) -> bool:
    """Return whether a profile's value and a discovered one mean the same."""
    if profile_text.strip().lower() == fact.text.strip().lower():
        return True
    if fact.key[-1] in {"memory", "size", "default_mem"}:
        with contextlib.suppress(ValueError):
            # The installed memory differs from what the kernel leaves.
            found_mib, profile_mib = Memory.parse(fact.text).mib, Memory.parse(profile_text).mib
            return abs(found_mib - profile_mib) <= 0.08 * max(found_mib, profile_mib)
    if fact.key[-1] == "model":
        found_model, profile_model = sites.plain(fact.text), sites.plain(profile_text)
        return found_model in profile_model or profile_model in found_model
    with contextlib.suppress(ValueError):
        return float(profile_text) == float(fact.text)
    return False


# ---- Probes ----


def probe_node_types(
    context: Context,
    cluster: ActiveCluster,
    survey: Survey,
    options: DiscoverOptions,
    parent: ClusterProfile | None,
    report_progress: Say,
) -> tuple[tuple[Probe, ...], DiscoveredCluster]:
    """Run a probe job on each node type, and return the outcomes, their facts and the notices.

    Args:
        parent: the profile that names the node types, if there is one.
    """
    groups = kinds(survey.nodes)
    names = from_slurm.names_of(groups, parent)
    targets, notices = choose_targets(groups, names, options, parent or cluster.profile, survey)
    probes = probe(
        context,
        cluster,
        targets,
        wait_s=options.wait_s,
        python=python_of(context, cluster, parent),
        report_progress=report_progress,
    )
    facts = seen_by(probes, groups, names, pyxis=survey.pyxis)
    return tuple(probes), facts + DiscoveredCluster(notices=tuple(notices))


def choose_targets(
    groups: Sequence[Kind],
    names: Mapping[str, str],
    options: DiscoverOptions,
    profile: ClusterProfile,
    survey: Survey,
) -> tuple[list[Target], list[str]]:
    """Return the node types to probe, and notices about those that are not probed."""
    eligible = [
        kind for kind in groups if not options.partitions or set(options.partitions) & set(kind.partitions)
    ]
    selected_kinds = [kind for kind in eligible if kind.node_type.gpus] or eligible[:1]
    notices = []
    if len(selected_kinds) > _MAX_PROBES:
        skipped_names = join_names(names[kind.name] for kind in selected_kinds[_MAX_PROBES:])
        notices.append(f"not probed: {skipped_names}; select other partitions with --partition")
    targets = []
    for kind in selected_kinds[:_MAX_PROBES]:
        if not kind.usable:
            notices.append(f"not probed: {names[kind.name]}, because none of its nodes can be used now")
            continue
        partition = _choose_partition(kind, options, profile, survey)
        targets.append(_make_target(kind, names[kind.name], partition, options, profile))
    return targets, notices


def _choose_partition(
    kind: Kind, options: DiscoverOptions, profile: ClusterProfile, survey: Survey
) -> str | None:
    """Return the partition for a probe; None if the nodes are in none.

    The order of preference: requested, the profile's, Slurm's default, open to all accounts, most nodes of
    the kind.
    """
    requested_partitions = [name for name in kind.partitions if name in options.partitions]
    from_profile = [name for name in kind.partitions if name in split_names(profile.slurm.partition)]
    default_names = [
        partition.name
        for partition in survey.partitions
        if partition.default and partition.name in kind.partitions
    ]
    open_to_all = {
        partition.name
        for partition in survey.partitions
        if partition.state in {"UP", ""} and not partition.allow_accounts
    }
    other_partitions = sorted(kind.partitions, key=lambda name: name not in open_to_all)
    return next(iter([*requested_partitions, *from_profile, *default_names, *other_partitions]), None)


def _make_target(
    kind: Kind, name: str, partition: str | None, options: DiscoverOptions, profile: ClusterProfile
) -> Target:
    slurm_rules, node_type = profile.slurm, kind.node_type
    slurm_options = [f"--time={_PROBE_TIME}"]
    if partition:
        slurm_options.append(f"--partition={partition}")
    target = choose_destination(Placement(partition=partition, qos=options.qos), profile)
    for option, value in (("account", options.account or slurm_rules.account), ("qos", target.qos)):
        if value:
            slurm_options.append(f"--{option}={value}")
    if slurm_rules.constraint:
        slurm_options.append(f"--constraint={slurm_rules.constraint}")
    idle_nodes = [node for node in kind.idle if partition is None or partition in node.partitions]
    if idle_nodes:
        slurm_options.append(f"--nodelist={idle_nodes[0].name}")
    if node_type.gpus and slurm_rules.gpu_request not in {"none", "constraint"}:
        gpu_type = f":{node_type.gpus.slurm_type}" if node_type.gpus.slurm_type else ""
        slurm_options.append(f"--gres=gpu{gpu_type}:{node_type.gpus.count}")
    if node_type.cpus:
        slurm_options.append(f"--cpus-per-task={min(node_type.cpus, 4)}")
    if node_type.memory and slurm_rules.mem != "forbidden":
        slurm_options.append(f"--mem={min(node_type.memory.mib // 2, _PROBE_MEMORY.mib)}M")
    slurm_options += slurm_rules.extra_options
    peers = [
        (node.name, node.address or node.name)
        for node in kind.nodes
        if not idle_nodes or node.name != idle_nodes[0].name
    ]
    return Target(name=name, options=tuple(slurm_options), peers=tuple(peers[:4]))


def python_of(context: Context, cluster: ActiveCluster, parent: ClusterProfile | None) -> str:
    """Return the interpreter that the user's jobs would use on the cluster."""
    for profile in (cluster.profile, parent):
        if profile is not None and profile.environment.python:
            return profile.environment.python
    if not cluster.remote:
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if context.env.get(name):
                return f"{context.env[name]}/bin/python"
    return "python3"


def seen_by(
    probes: Iterable[Probe], groups: Sequence[Kind], names: Mapping[str, str], *, pyxis: bool
) -> DiscoveredCluster:
    """Return the facts that the probes reported."""
    discovered = DiscoveredCluster()
    gpu_counts = {names[kind.name]: kind.node_type.gpu_count for kind in groups}
    for outcome in probes:
        if outcome.problem:
            discovered += DiscoveredCluster(
                notices=(f"the probe of {outcome.name} failed: {outcome.problem}",)
            )
            continue
        facts = from_probe.facts_from_probe(outcome.name, outcome.seen, gpu_counts.get(outcome.name, 0))
        if pyxis:
            facts = replace(facts, facts=tuple(fact for fact in facts.facts if fact.key[0] != "container"))
        discovered = facts + discovered  # the first probe has the most GPUs: its cluster-wide facts win
    return discovered


# ---- The file ----


def _head(survey: Survey, context: Context) -> DiscoveredCluster:
    day = _today(context)
    facts = [
        Fact(("title",), survey.cluster or survey.host or "A cluster", "ClusterName", "guess"),
        Fact(
            ("sources",), (f"dtslurm cluster discover on {survey.host or 'this machine'}, {day}",), "this run"
        ),
    ]
    return DiscoveredCluster(tuple(facts))


def _login(host: str, survey: Survey, parent: ClusterProfile | None) -> DiscoveredCluster:
    facts = (
        []
        if parent and parent.login.host == host
        else [Fact(("login", "host"), host, "the host in the command")]
    )
    if survey.python and survey.python != "python3":
        facts.append(
            Fact(("login", "python"), survey.python, "python3 on the login node is missing or too old")
        )
    return DiscoveredCluster(tuple(facts))


def _comments(
    context: Context,
    survey: Survey,
    host: str | None,
    matching_sites: Sequence[tuple[str, str]],
    extends: str | None,
) -> list[str]:
    command = f"dtslurm cluster discover{f' {host}' if host else ''}"
    lines = [
        f"Written by {command} on {_today(context)}, Slurm {survey.version or '?'}.",
        (
            "Each value has its evidence and the certainty of this evidence. Correct any value: discover "
            "keeps your"
        ),
        "edits when it runs again. dtslurm cluster check verifies the profile.",
    ]
    if extends and matching_sites:
        lines.append(
            f"Recognized as {extends} by {matching_sites[0][1]}: "
            "values of that profile are not repeated here."
        )
    elif len(matching_sites) > 1:
        site_names = join_names(name for name, _ in matching_sites)
        lines.append(
            f"Known profiles that may match: {site_names}; write 'extends: NAME' with the name of the "
            "right profile."
        )
    return lines


def _today(context: Context) -> str:
    return datetime.fromtimestamp(context.clock(), timezone.utc).strftime("%Y-%m-%d")
