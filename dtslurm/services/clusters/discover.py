"""Describe a cluster by what it says itself: one command on its login node, and a few small jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dtslurm.config import profiles
from dtslurm.discover import from_probe, from_slurm, page, sites
from dtslurm.discover.facts import DiscoveredCluster, Fact, listed, text_of
from dtslurm.discover.kinds import Kind, kinds
from dtslurm.errors import RequestInvalid, SlurmUnavailable
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import destination, names_in
from dtslurm.model.jobs.options import Placement
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.services.clusters.probing import Probe, Target, probe
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import survey as surveys
from dtslurm.slurm.survey import Survey
from dtslurm.store import codec

_LIMIT_S = 20
_MOST_PROBES = 3
_PROBE_TIME = Walltime(300)
_PROBE_MEMORY = Memory(4096)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What was found of a cluster, and the profile that says so.

    Attributes:
        name: what the profile may be called.
        extends: the known site's profile that it completes.
        text: the profile.
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
    """What to look at, and how.

    Attributes:
        partitions: probe nodes of these only; empty for any.
        account, qos: for the probe jobs.
        wait_s: how long probe jobs may wait for their start.
    """

    partitions: tuple[str, ...] = ()
    probe: bool = True
    account: str | None = None
    qos: str | None = None
    wait_s: float = 120.0


def look(cluster: ActiveCluster) -> Survey:
    """Return what the login node tells: one command, at most 5 requests to the controller.

    Raises:
        RequestInvalid: there is no Slurm.
        SlurmUnavailable: it does not answer.
        TransportError: the login node cannot be reached.
    """
    pythons = [
        name for name in (cluster.profile.login.python, "python3", "/usr/libexec/platform-python") if name
    ]
    answer = cluster.transport.run(surveys.question(_LIMIT_S, pythons), timeout=6 * _LIMIT_S)
    survey = surveys.read(answer.stdout)
    where = cluster.transport.host
    if "scontrol" in survey.missing and "sinfo" in survey.missing:
        raise RequestInvalid(
            [f"there is no Slurm on {where}: neither scontrol nor sinfo is on PATH"],
            hint="login shells alone may set PATH, unlike ssh's commands; PBS, LSF and AGE are not Slurm",
        )
    if not survey.nodes and not survey.partitions and not survey.config:
        said = [f"{name}: {words}" for name, words in survey.silent.items()]
        raise SlurmUnavailable(
            f"Slurm on {where} told nothing of its nodes and partitions",
            evidence=said or answer.stderr.splitlines()[-5:],
            hint="see whether sinfo works there",
        )
    return survey


def discover(
    context: Context,
    cluster: ActiveCluster,
    wanted: DiscoverOptions,
    *,
    host: str | None = None,
    extends: str | None = None,
    own: Path | None = None,
    say: Say = lambda _: None,
) -> Discovery:
    """Find out what a profile should say of a cluster.

    Args:
        host: the login node as the user names it, None for this machine.
        extends: the profile to complete, where the user has chosen one already.
        own: the file that will be written.

    Raises:
        RequestInvalid, SlurmUnavailable, TransportError: see `look`; there is no such partition.
    """
    survey = look(cluster)
    known = {one.name for one in survey.partitions} | {
        name for node in survey.nodes for name in node.partitions
    }
    unknown = [name for name in wanted.partitions if name not in known]
    if unknown:
        raise RequestInvalid(
            [f"there is no partition {listed(unknown)}; there are: {listed(sorted(known), 20)}"]
        )
    hosts = [survey.host, host or "", cluster.profile.login.host or ""]
    fitting = [] if extends else _sites(context, survey, hosts)
    parent_name = extends or (fitting[0][0] if len(fitting) == 1 else None)
    parent = _profile(context, parent_name, own) if parent_name else None
    groups = kinds(survey.nodes)
    names = from_slurm.names_of(groups, parent)
    found = from_slurm.found(survey, groups, parent)
    probes: tuple[Probe, ...] = ()
    if wanted.probe:
        targets, left_out = targets_of(groups, names, wanted, parent or cluster.profile, survey)
        python = python_of(context, cluster, parent)
        probes = tuple(probe(context, cluster, targets, wait_s=wanted.wait_s, python=python, say=say))
        found += seen_by(probes, groups, names, pyxis=survey.pyxis)
        found += DiscoveredCluster(notices=tuple(left_out))
    found = _login(host, survey, parent) + found if host else found
    found = _head(survey, context) + found if parent is None else _news(found, parent)
    name = parent_name or sites.profile_name(survey.cluster, host)
    head = _comments(context, survey, host, fitting, parent_name)
    text = page.text(found, head=head, extends=parent_name)
    return Discovery(
        name=name, extends=parent_name, survey=survey, kinds=tuple(groups), names=names, found=found,
        probes=probes, text=text,
    )  # fmt: skip


# ---- Known sites ----


def _sites(context: Context, survey: Survey, hosts: Sequence[str]) -> list[tuple[str, str]]:
    known: dict[str, ClusterProfile] = {}
    for path in sorted(profiles.packaged().glob("*.yaml")):
        known[path.stem] = profiles.load(str(path), cwd=context.cwd, env=context.env).profile
    some = [group[len(group) // 2].name for group in (survey.nodes[:1], survey.nodes[-1:]) if group]
    return sites.known_as(known, survey.cluster, hosts, some)


def _profile(context: Context, name: str, own: Path | None) -> ClusterProfile:
    """Return the profile to complete: never the very file that is written."""
    if own is not None and profiles.find(name, cwd=context.cwd, env=context.env) == own:
        name = str(profiles.packaged() / f"{name}.yaml")
    return profiles.load(name, cwd=context.cwd, env=context.env).profile


def _news(found: DiscoveredCluster, parent: ClusterProfile) -> DiscoveredCluster:
    """Return what the site's profile does not say, and what is surely otherwise, with that profile's word."""
    says = dict(flat(codec.plain(parent)))
    facts = []
    for fact in found.facts:
        there = says.get(fact.key)
        if there is None:
            facts.append(fact)
        elif fact.sure == "sure" and not same(there, fact):
            facts.append(replace(fact, evidence=f"{fact.evidence} (profile {parent.name}: {there})"))
    return replace(found, facts=tuple(facts))


def flat(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (key, text) of every value that a profile sets."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*above, key))
        elif isinstance(value, list):
            if value:
                yield (*above, key), text_of(tuple(map(str, value)))
        elif value is not None:
            yield (*above, key), text_of(value)


def same(there: str, fact: Fact) -> bool:
    """Whether a profile's value and a found one are equal, as far as people mean it."""
    if there.strip().lower() == fact.text.strip().lower():
        return True
    if fact.key[-1] in {"memory", "size", "default_mem"}:
        with contextlib.suppress(ValueError):
            ours, theirs = Memory.parse(fact.text).mib, Memory.parse(there).mib
            return abs(ours - theirs) <= 0.08 * max(
                ours, theirs
            )  # what is built in and what the kernel leaves
    if fact.key[-1] == "model":
        a, b = sites.plain(fact.text), sites.plain(there)
        return a in b or b in a
    with contextlib.suppress(ValueError):
        return float(there) == float(fact.text)
    return False


# ---- Probes ----


def targets_of(
    groups: Sequence[Kind],
    names: Mapping[str, str],
    wanted: DiscoverOptions,
    profile: ClusterProfile,
    survey: Survey,
) -> tuple[list[Target], list[str]]:
    """Return which node types are looked at from inside, and why others are not."""
    inside = [
        kind for kind in groups if not wanted.partitions or set(wanted.partitions) & set(kind.partitions)
    ]
    chosen = [kind for kind in inside if kind.node_type.gpus] or inside[:1]
    notices = []
    if len(chosen) > _MOST_PROBES:
        rest = listed(names[kind.name] for kind in chosen[_MOST_PROBES:])
        notices.append(f"not probed: {rest}; --partition chooses where to look")
    targets = []
    for kind in chosen[:_MOST_PROBES]:
        if not kind.usable:
            notices.append(f"not probed: {names[kind.name]}, of which no node can be used now")
            continue
        partition = _partition(kind, wanted, profile, survey)
        targets.append(_target(kind, names[kind.name], partition, wanted, profile))
    return targets, notices


def _partition(kind: Kind, wanted: DiscoverOptions, profile: ClusterProfile, survey: Survey) -> str | None:
    """Return where a probe goes: as asked, as usual, by default, else where most of the nodes take jobs."""
    asked = [name for name in kind.partitions if name in wanted.partitions]
    usual = [name for name in kind.partitions if name in names_in(profile.slurm.partition)]
    default = [one.name for one in survey.partitions if one.default and one.name in kind.partitions]
    open_to_all = {
        one.name for one in survey.partitions if one.state in {"UP", ""} and not one.allow_accounts
    }
    others = sorted(kind.partitions, key=lambda name: name not in open_to_all)
    return next(iter([*asked, *usual, *default, *others]), None)


def _target(
    kind: Kind, name: str, partition: str | None, wanted: DiscoverOptions, profile: ClusterProfile
) -> Target:
    customs, own = profile.slurm, kind.node_type
    options = [f"--time={_PROBE_TIME}"]
    if partition:
        options.append(f"--partition={partition}")
    goes = destination(Placement(partition=partition, qos=wanted.qos), profile)
    for word, value in (("account", wanted.account or customs.account), ("qos", goes.qos)):
        if value:
            options.append(f"--{word}={value}")
    if customs.constraint:
        options.append(f"--constraint={customs.constraint}")
    idle = [node for node in kind.idle if partition is None or partition in node.partitions]
    if idle:
        options.append(f"--nodelist={idle[0].name}")
    if own.gpus and customs.gpu_request not in {"none", "constraint"}:
        kind_of = f":{own.gpus.slurm_type}" if own.gpus.slurm_type else ""
        options.append(f"--gres=gpu{kind_of}:{own.gpus.count}")
    if own.cpus:
        options.append(f"--cpus-per-task={min(own.cpus, 4)}")
    if own.memory and customs.mem != "forbidden":
        options.append(f"--mem={min(own.memory.mib // 2, _PROBE_MEMORY.mib)}M")
    options += customs.extra_options
    peers = [
        (node.name, node.address or node.name) for node in kind.nodes if not idle or node.name != idle[0].name
    ]
    return Target(name=name, options=tuple(options), peers=tuple(peers[:4]))


def python_of(context: Context, cluster: ActiveCluster, parent: ClusterProfile | None) -> str:
    """Return the interpreter that jobs of the user would take there."""
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
    """Return what the probes saw, as values."""
    found = DiscoveredCluster()
    gpus = {names[kind.name]: kind.node_type.gpu_count for kind in groups}
    for one in probes:
        if one.problem:
            found += DiscoveredCluster(notices=(f"no probe of {one.name}: {one.problem}",))
            continue
        seen = from_probe.found(one.name, one.seen, gpus.get(one.name, 0))
        if pyxis:
            seen = replace(seen, facts=tuple(fact for fact in seen.facts if fact.key[0] != "container"))
        found = seen + found  # the first probe is of the nodes with most GPUs: what is the cluster's is by it
    return found


# ---- The file ----


def _head(survey: Survey, context: Context) -> DiscoveredCluster:
    day = _day(context)
    facts = [
        Fact(("title",), survey.cluster or survey.host or "A cluster", "ClusterName", "guess"),
        Fact(
            ("sources",), (f"dtslurm cluster discover on {survey.host or 'this machine'}, {day}",), "this run"
        ),
    ]
    return DiscoveredCluster(tuple(facts))


def _login(host: str, survey: Survey, parent: ClusterProfile | None) -> DiscoveredCluster:
    facts = (
        [] if parent and parent.login.host == host else [Fact(("login", "host"), host, "as you reached it")]
    )
    if survey.python and survey.python != "python3":
        facts.append(Fact(("login", "python"), survey.python, "there is no good python3 on the login node"))
    return DiscoveredCluster(tuple(facts))


def _comments(
    context: Context,
    survey: Survey,
    host: str | None,
    fitting: Sequence[tuple[str, str]],
    extends: str | None,
) -> list[str]:
    where = f"dtslurm cluster discover{f' {host}' if host else ''}"
    lines = [
        f"Written by {where} on {_day(context)}, Slurm {survey.version or '?'}.",
        "Each value has what told it and how sure that is. Edit what you know better: discover keeps your",
        "edits when it looks again. dtslurm cluster check proves the profile.",
    ]
    if extends and fitting:
        lines.append(
            f"Known as {extends} by {fitting[0][1]}: what that profile says already is not repeated here."
        )
    elif len(fitting) > 1:
        named = listed(name for name, _ in fitting)
        lines.append(f"Known profiles that may fit: {named}; write 'extends: NAME' with the right one.")
    return lines


def _day(context: Context) -> str:
    return datetime.fromtimestamp(context.clock(), timezone.utc).strftime("%Y-%m-%d")
