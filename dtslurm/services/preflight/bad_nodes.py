"""Nodes that were found bad: in the user's own store, below run roots, and in a team's file."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model import nodes
from dtslurm.model.jobs.destination import destination
from dtslurm.model.jobs.job import JobRecord, Resources, TaskLayout
from dtslurm.model.nodes import ListedNode, NodeNote
from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.model.units import pluralize
from dtslurm.model.values import dataclass
from dtslurm.scheduler.base import NodeLister
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import site_of, variables_in
from dtslurm.services.wiring.remote_query import ask
from dtslurm.store.index import state_folder
from dtslurm.store.rundir import RunDir
from dtslurm.worker.lib.node_blocklist import HOLDS_S, exchange, read_supervisor_notes
from dtslurm.worker.supervisor.restart_policy import ELSEWHERE

if TYPE_CHECKING:
    from dtslurm.model.runs.diagnosis import Verdict

_SURE = 0.7
# What makes a node bad for other jobs, too; a port that was taken, or data that did not fit, does not.
_LASTING = ELSEWHERE | {"disk-full", "health-check", "invalid-device"}
_MANY_TASKS = 256
_SHOWN = 8
_LIMIT_S = 30.0


@dataclass(frozen=True)
class Known:
    """What is known of a cluster's nodes.

    Attributes:
        notes: one on each node that something is said against.
        shared: the names of those that the team's file tells of.
        trouble: why the team's file could not be read, empty if it was or there is none.
    """

    notes: tuple[NodeNote, ...]
    shared: frozenset[str] = frozenset()
    trouble: str = ""


@dataclass(frozen=True)
class NodeExclusion:
    """What a submission makes of it: the value of ``--exclude``, and what the user should know."""

    exclude: str | None
    notices: tuple[str, ...] = ()


def known(context: Context, cluster: ActiveCluster, request: JobRequest | None = None) -> Known:
    """Return what is known of a cluster's nodes now.

    Args:
        request: a submission, whose run root may be one of its own.
    """
    now = context.clock()
    own = nodes.read(_own(context, cluster, ()), now)
    own += [
        one
        for one in nodes.read(_read_supervisors(context, cluster, request), now)
        if one.cluster == cluster.name  # a run root may serve several clusters
    ]
    try:
        shared = nodes.read(_shared(context, cluster, ()), now)
        trouble = ""
    except DtslurmError as error:
        shared, trouble = [], error.message
    names = {note.node for note in nodes.current(shared, now)}
    return Known(tuple(nodes.current([*own, *shared], now)), frozenset(names), trouble)


def note(context: Context, cluster: ActiveCluster, notes: Sequence[NodeNote]) -> str:
    """Remember notes; return why the team's file could not be written, empty if it was or there is none.

    Raises:
        StoreError: the user's own store cannot be written.
    """
    lines = [nodes.line(one) for one in notes]
    _own(context, cluster, lines)
    try:
        _shared(context, cluster, lines)
    except DtslurmError as error:
        return error.message
    return ""


def _own(context: Context, cluster: ActiveCluster, lines: Sequence[str]) -> list[str]:
    name = re.sub(r"[^\w.-]", "-", cluster.name)
    path = state_folder(context.env) / "nodes" / f"{name}.jsonl"
    try:
        if lines:
            make_own_folder(path.parent)
        if path.exists():
            read_own_file(path)
        return exchange(str(path), lines)
    except OSError as error:
        if not lines:  # what cannot be read keeps no job back
            return []
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _read_supervisors(context: Context, cluster: ActiveCluster, request: JobRequest | None) -> list[str]:
    """Return what the supervisors of the user's runs noted below the run roots; nothing where they fail."""
    from dtslurm.services.request.run_paths import run_root

    if cluster.access.scheduler != "slurm":
        return []
    roots: dict[str, None] = {}
    with contextlib.suppress(DtslurmError):
        roots[run_root(context, cluster, request)] = None
    if not cluster.remote:
        with contextlib.suppress(StoreError):
            rows = context.index.rows(cluster.name)
            roots |= dict.fromkeys(str(row.folder.parent) for row in rows)
        return read_supervisor_notes(list(roots))
    with contextlib.suppress(DtslurmError):
        python = site_of(context, cluster).python or "python3"
        wanted = {"run_roots": list(roots)}
        answer = ask(cluster.transport, python, "lib.node_blocklist", wanted, timeout=_LIMIT_S)
        return [str(one) for one in answer.get("lines", [])]
    return []


def _shared(context: Context, cluster: ActiveCluster, lines: Sequence[str]) -> list[str]:
    """Append to the team's file and return what is in it; nothing where the profile names none.

    Raises:
        StoreError: it cannot be read or written.
        TransportError: the cluster cannot be reached.
    """
    text = cluster.profile.paths.node_memory
    if text is None:
        return []
    env: Mapping[str, str] = context.env
    python = sys.executable
    if cluster.remote:
        site = site_of(context, cluster, variables_in(text))
        env, python = site.env, site.python or "python3"
    path = Template(re.sub(r"^~(?=/)", lambda _: env.get("HOME", "~"), text)).safe_substitute(env)
    if "$" in path or not path.startswith("/"):
        raise StoreError(f"the team's node memory {text!r} is no absolute path there")
    if not cluster.remote:
        try:
            return exchange(path, lines, 0o664)
        except OSError as error:
            raise StoreError(f"the team's node memory {path} failed: {error.strerror}") from error
    request = {"path": path, "lines": list(lines), "mode": 0o664}
    answer = ask(cluster.transport, python, "lib.node_blocklist", request, timeout=_LIMIT_S)
    if answer.get("problem"):
        raise StoreError(f"the team's node memory {path} failed: {answer['problem']}")
    return [str(one) for one in answer.get("lines", [])]


# ---- By hand ----


def add(
    context: Context, cluster: ActiveCluster, names: Sequence[str], reason: str, holds_s: float
) -> tuple[list[NodeNote], str]:
    """Note by hand that nodes are bad; see `note` for what is returned and raised."""
    now = context.clock()
    notes = [
        NodeNote(
            node=name,
            cluster=cluster.name,
            reason=nodes.plain(reason),
            by=context.env.get("USER", ""),
            when=now,
            expires=now + min(holds_s, nodes.LONGEST_S),
        )
        for name in names
    ]
    return notes, note(context, cluster, notes)


def remove(context: Context, cluster: ActiveCluster, names: Sequence[str]) -> tuple[list[str], str]:
    """Forget what is said against nodes; return those that something was said against, and as `note` does."""
    there = {one.node for one in known(context, cluster).notes}
    gone = [name for name in names if name in there]
    now, user = context.clock(), context.env.get("USER", "")
    notes = [
        NodeNote(node=name, cluster=cluster.name, by=user, when=now, expires=now + HOLDS_S, removed=True)
        for name in gone
    ]
    return gone, note(context, cluster, notes) if notes else ""


# ---- From runs ----


def learn(context: Context, record: JobRecord, verdict: Verdict | None = None) -> None:
    """Remember which nodes a run, or the verdict on it, found bad. A mere convenience: nothing is raised."""
    with contextlib.suppress(DtslurmError, OSError):
        found = list(_of_run(record))
        if verdict is not None and verdict.node and _tells_of_its_node(verdict):
            evidence = verdict.evidence[0].text if verdict.evidence else ""
            when = verdict.time or context.clock()
            found.append(_note(record, verdict.node, verdict.summary, float(when), evidence))
        now = context.clock()
        found = [one for one in found if nodes.NODE_NAME.fullmatch(one.node) and one.expires > now]
        if not found:
            return
        cluster = context.cluster_of(record)
        if cluster.profile.scheduler != "slurm":
            return
        before = nodes.read(_own(context, cluster, ()), now)
        seen = {(one.node, one.job, int(one.when)) for one in before}
        told = {(one.node, one.job) for one in before if one.job}
        new = [
            one
            for one in found
            if (one.node, one.job, int(one.when)) not in seen
            and not (one.evidence and (one.node, one.job) in told)  # a verdict repeats what the run noted
        ]
        if new:
            note(context, cluster, new)


def _tells_of_its_node(verdict: Verdict) -> bool:
    return verdict.blame == "node" and verdict.cause in _LASTING and verdict.confidence >= _SURE


def _of_run(record: JobRecord) -> Iterator[NodeNote]:
    run = RunDir(Path(record.folder))
    tasks = list(run.tasks().values()) if record.array is not None else []
    for place in [run, *tasks[:_MANY_TASKS]]:
        for event in place.events():
            if event.get("event") == "node_excluded" and isinstance(event.get("time"), int | float):
                reason = nodes.plain(event.get("reason"))
                yield _note(record, str(event.get("node")), reason, float(event["time"]))


def _note(record: JobRecord, node: str, reason: str, when: float, evidence: str = "") -> NodeNote:
    return NodeNote(
        node=node,
        cluster=record.cluster,
        reason=nodes.plain(reason),
        evidence=nodes.plain(evidence),
        job=record.job_id or "",
        by="dtslurm",
        when=when,
        expires=when + HOLDS_S,
    )


# ---- At submission ----


def exclude_bad_nodes(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    resources: Resources,
    layout: TaskLayout | None,
    remarks: list[str],
) -> Resources:
    """Return what to ask for, without nodes that are known to be bad, and add to ``remarks`` which these are.

    Args:
        layout: None where nothing is to be left out.
    """
    if layout is None:
        return resources
    found = left_out(context, cluster, request, resources, layout)
    remarks += found.notices
    return replace(resources, exclude=found.exclude)


def left_out(
    context: Context, cluster: ActiveCluster, request: JobRequest, resources: Resources, layout: TaskLayout
) -> NodeExclusion:
    """Return what to leave out of a job: nodes that something is said against, as far as it can do without.

    The scheduler is asked for its nodes only where something is known. With ``--no-check`` it may not be
    asked, and nothing is left out.
    """
    asked = resources.exclude
    slurm = isinstance(cluster.scheduler, NodeLister)
    if request.node_memory is False or request.no_check or not slurm:
        return NodeExclusion(asked)
    found = known(context, cluster, request)
    notices = [found.trouble] if found.trouble else []
    by_name = {one.node: one for one in found.notes}
    for name in sorted(_names(asked)):
        by_name.pop(name, None)
    wanted = [by_name.pop(name) for name in sorted(_names(resources.nodelist)) if name in by_name]
    if wanted:
        notices.append(f"asked for by --nodelist, though known to be bad: {_told(wanted)}")
    if not by_name:
        return NodeExclusion(asked, tuple(notices))
    try:
        own = _names(asked)
        listed = [node for node in _listed(cluster, resources) if node.name not in own]
    except DtslurmError as error:
        return NodeExclusion(asked, (*notices, f"no node is left out: {error.message}"))
    out, kept = nodes.fitting(list(by_name.values()), listed, layout.nodes + (request.spare_nodes or 0))
    if kept:
        notices.append(f"known to be bad, but without them the job could not run: {_told(kept)}")
    if not out:
        return NodeExclusion(asked, tuple(notices))
    notices.append(f"{pluralize(len(out), 'node')} left out: {_told(out)}; --no-node-memory takes them")
    folded = _folded([one.node for one in out])
    return NodeExclusion(f"{asked},{folded}" if asked else folded, tuple(notices))


def _listed(cluster: ActiveCluster, resources: Resources) -> list[ListedNode]:
    """Return the nodes that the job may get, as far as one can tell."""
    profile = cluster.profile
    if not isinstance(cluster.scheduler, NodeLister):
        return []
    goes = destination(resources, profile)
    listed = cluster.scheduler.nodes(goes.partition)
    constraint = goes.constraint or ""
    if re.fullmatch(r"\w+(&\w+)*", constraint):
        return [node for node in listed if set(constraint.split("&")).issubset(node.features)]
    return listed


def _names(text: str | None) -> set[str]:
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return set(NodeSet(text or ""))
    except NodeSetException:
        return set()


def _folded(names: Sequence[str]) -> str:
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))


def _told(notes: Sequence[NodeNote]) -> str:
    words = []
    for one in notes[:_SHOWN]:
        day = time.strftime("%d %b", time.localtime(one.when)).lstrip("0")
        words.append(f"{one.node} ({_short(one.reason) or 'noted'} on {day})")
    more = f" and {len(notes) - _SHOWN} more" if len(notes) > _SHOWN else ""
    return ", ".join(words) + more


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def values(found: Known) -> list[dict[str, Any]]:
    """Return the notes for programs, each with whether the team's file tells it, too."""
    from dtslurm.store.codec import plain

    return [{**plain(one), "shared": one.node in found.shared} for one in found.notes]
