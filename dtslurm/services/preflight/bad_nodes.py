"""The bad-node list: notes in the user's own store, below run roots, and in a team's file."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model import nodes
from dtslurm.model.diagnostics import Checked, notes
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobRecord, Resources, TaskLayout
from dtslurm.model.nodes import ListedNode, NodeNote
from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.scheduler.base import NodeLister
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import query_login_node, variables_in
from dtslurm.services.wiring.remote_query import WorkerHost, query_worker
from dtslurm.store.codec import plain
from dtslurm.store.index import state_folder
from dtslurm.store.rundir import RunDir
from dtslurm.worker.lib.node_blocklist import HOLDS_S, exchange, read_supervisor_notes
from dtslurm.worker.supervisor.restart_policy import ELSEWHERE

if TYPE_CHECKING:
    from dtslurm.model.runs.diagnosis import Verdict

_MIN_CONFIDENCE = 0.7
# Causes that also affect other jobs on the node; a port in use, or data that did not fit, does not.
_LASTING_CAUSES = ELSEWHERE | {"disk-full", "health-check", "invalid-device"}
_MANY_TASKS = 256
_MOST_LISTED = 8
_QUERY_LIMIT_S = 30.0


@dataclass(frozen=True)
class NodeNotes:
    """The notes on a cluster's nodes.

    Attributes:
        notes: the current note on each bad node.
        shared: the names of the nodes that the team's file lists.
        trouble: why the team's file could not be read; empty if it was read or there is none.
    """

    notes: tuple[NodeNote, ...]
    shared: frozenset[str] = frozenset()
    trouble: str = ""


def read_notes(context: Context, cluster: ActiveCluster, request: JobRequest | None = None) -> NodeNotes:
    """Return the current notes on a cluster's nodes.

    Args:
        context: the environment and the clock.
        cluster: the cluster.
        request: a submission, which may set another run root.
    """
    now = context.clock()
    own_notes = nodes.parse_notes(_exchange_own(context, cluster, ()), now)
    own_notes += [
        entry
        for entry in nodes.parse_notes(_query_supervisor_notes(context, cluster, request), now)
        if entry.cluster == cluster.name  # a run root may serve several clusters
    ]
    try:
        shared_notes = nodes.parse_notes(_exchange_shared(context, cluster, ()), now)
        error_text = ""
    except DtslurmError as error:
        shared_notes, error_text = [], error.message
    shared_names = {note.node for note in nodes.select_newest_notes(shared_notes, now)}
    return NodeNotes(
        tuple(nodes.select_newest_notes([*own_notes, *shared_notes], now)),
        frozenset(shared_names),
        error_text,
    )


def note(context: Context, cluster: ActiveCluster, notes: Sequence[NodeNote]) -> str:
    """Store notes; return why the team's file could not be written, empty if it was written or there is none.

    Raises:
        StoreError: the user's own store cannot be written.
    """
    lines = [nodes.format_note(entry) for entry in notes]
    _exchange_own(context, cluster, lines)
    try:
        _exchange_shared(context, cluster, lines)
    except DtslurmError as error:
        return error.message
    return ""


def _exchange_own(context: Context, cluster: ActiveCluster, lines: Sequence[str]) -> list[str]:
    name = re.sub(r"[^\w.-]", "-", cluster.name)
    path = state_folder(context.env) / "nodes" / f"{name}.jsonl"
    try:
        if lines:
            make_own_folder(path.parent)
        if path.exists():
            read_own_file(path)
        return exchange(str(path), lines)
    except OSError as error:
        if not lines:  # an unreadable list must not prevent a submission
            return []
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _query_supervisor_notes(
    context: Context, cluster: ActiveCluster, request: JobRequest | None
) -> list[str]:
    """Return the notes that supervisors of the user's runs wrote below the run roots; empty on an error."""
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
        python = query_login_node(context, cluster).python or "python3"
        query = {"run_roots": list(roots)}
        answer = query_worker(
            WorkerHost(cluster.transport, python), "lib.node_blocklist", query, timeout=_QUERY_LIMIT_S
        )
        return [str(text) for text in answer.get("lines", [])]
    return []


def _exchange_shared(context: Context, cluster: ActiveCluster, lines: Sequence[str]) -> list[str]:
    """Append to the team's file and return its lines; an empty list if the profile names no file.

    Raises:
        StoreError: the file cannot be read or written.
        TransportError: the cluster cannot be reached.
    """
    text = cluster.profile.paths.node_memory
    if text is None:
        return []
    env: Mapping[str, str] = context.env
    python = sys.executable
    if cluster.remote:
        login_node = query_login_node(context, cluster, variables_in(text))
        env, python = login_node.env, login_node.python or "python3"
    path = Template(re.sub(r"^~(?=/)", lambda _: env.get("HOME", "~"), text)).safe_substitute(env)
    if "$" in path or not path.startswith("/"):
        raise StoreError(f"the path of the team's bad-node list is not absolute on the login node: {text!r}")
    if not cluster.remote:
        try:
            return exchange(path, lines, 0o664)
        except OSError as error:
            raise StoreError(f"cannot use the team's bad-node list {path}: {error.strerror}") from error
    request = {"path": path, "lines": list(lines), "mode": 0o664}
    answer = query_worker(
        WorkerHost(cluster.transport, python), "lib.node_blocklist", request, timeout=_QUERY_LIMIT_S
    )
    if answer.get("problem"):
        raise StoreError(f"cannot use the team's bad-node list {path}: {answer['problem']}")
    return [str(entry) for entry in answer.get("lines", [])]


# ---- Notes by the user ----


def add(
    context: Context, cluster: ActiveCluster, names: Sequence[str], reason: str, holds_s: float
) -> tuple[list[NodeNote], str]:
    """Store the user's note that nodes are bad; see `note` for the errors."""
    now = context.clock()
    notes = [
        NodeNote(
            node=name,
            cluster=cluster.name,
            reason=nodes.make_printable(reason),
            by=context.env.get("USER", ""),
            when=now,
            expires=now + min(holds_s, nodes.LONGEST_S),
        )
        for name in names
    ]
    return notes, note(context, cluster, notes)


def remove(context: Context, cluster: ActiveCluster, names: Sequence[str]) -> tuple[list[str], str]:
    """Remove the notes on nodes; return the nodes that had notes, and the error text of `note`."""
    noted_names = {entry.node for entry in read_notes(context, cluster).notes}
    removed_names = [name for name in names if name in noted_names]
    now, user = context.clock(), context.env.get("USER", "")
    notes = [
        NodeNote(node=name, cluster=cluster.name, by=user, when=now, expires=now + HOLDS_S, removed=True)
        for name in removed_names
    ]
    return removed_names, note(context, cluster, notes) if notes else ""


# ---- Notes from runs ----


def store_run_notes(context: Context, record: JobRecord, verdict: Verdict | None = None) -> None:
    """Store the nodes that a run or its diagnosis found bad; suppress errors, as the list is optional."""
    with contextlib.suppress(DtslurmError, OSError):
        candidates = list(_iter_run_notes(record))
        if verdict is not None and verdict.node and _blames_node(verdict):
            evidence = verdict.evidence[0].text if verdict.evidence else ""
            noted_at = verdict.time or context.clock()
            candidates.append(_make_note(record, verdict.node, verdict.summary, float(noted_at), evidence))
        now = context.clock()
        candidates = [
            entry for entry in candidates if nodes.NODE_NAME.fullmatch(entry.node) and entry.expires > now
        ]
        if not candidates:
            return
        cluster = context.cluster_of(record)
        if cluster.profile.scheduler != "slurm":
            return
        stored_notes = nodes.parse_notes(_exchange_own(context, cluster, ()), now)
        stored_keys = {(entry.node, entry.job, int(entry.when)) for entry in stored_notes}
        stored_jobs = {(entry.node, entry.job) for entry in stored_notes if entry.job}
        new_notes = [
            entry
            for entry in candidates
            if (entry.node, entry.job, int(entry.when)) not in stored_keys
            # A diagnosis repeats the run's own note, perhaps with another time.
            and not (entry.evidence and (entry.node, entry.job) in stored_jobs)
        ]
        if new_notes:
            note(context, cluster, new_notes)


def _blames_node(verdict: Verdict) -> bool:
    return (
        verdict.blame == "node" and verdict.cause in _LASTING_CAUSES and verdict.confidence >= _MIN_CONFIDENCE
    )


def _iter_run_notes(record: JobRecord) -> Iterator[NodeNote]:
    run = RunDir(Path(record.folder))
    tasks = list(run.tasks().values()) if record.array is not None else []
    for event_source in [run, *tasks[:_MANY_TASKS]]:
        for event in event_source.events():
            if event.get("event") != "node_excluded" or event.get("suspected"):
                continue  # a node that is only suspected is excluded from that run alone
            if isinstance(event.get("time"), int | float):
                reason = nodes.make_printable(event.get("reason"))
                yield _make_note(record, str(event.get("node")), reason, float(event["time"]))


def _make_note(record: JobRecord, node: str, reason: str, noted_at: float, evidence: str = "") -> NodeNote:
    return NodeNote(
        node=node,
        cluster=record.cluster,
        reason=nodes.make_printable(reason),
        evidence=nodes.make_printable(evidence),
        job=record.job_id or "",
        by="dtslurm",
        when=noted_at,
        expires=noted_at + HOLDS_S,
    )


# ---- At submission ----


def choose_exclusion(
    context: Context, cluster: ActiveCluster, request: JobRequest, resources: Resources, layout: TaskLayout
) -> Checked[str | None]:
    """Return the value of ``--exclude`` with the bad nodes, as far as enough other nodes remain.

    The scheduler's list of nodes is queried only if there are notes. With ``--no-check`` it may not be
    queried, and no node is excluded.
    """
    user_exclude = resources.exclude
    can_list_nodes = isinstance(cluster.scheduler, NodeLister)
    if request.node_memory is False or request.no_check or not can_list_nodes:
        return Checked(user_exclude)
    known_nodes = read_notes(context, cluster, request)
    notices = [known_nodes.trouble] if known_nodes.trouble else []
    notes_by_node = {entry.node: entry for entry in known_nodes.notes}
    for name in sorted(_expand_hostlist(user_exclude)):
        notes_by_node.pop(name, None)
    requested_notes = [
        notes_by_node.pop(name)
        for name in sorted(_expand_hostlist(resources.nodelist))
        if name in notes_by_node
    ]
    if requested_notes:
        notices.append(f"--nodelist requests nodes of the bad-node list: {_describe_notes(requested_notes)}")
    if not notes_by_node:
        return Checked(user_exclude, notes(notices))
    try:
        user_excluded = _expand_hostlist(user_exclude)
        listed_nodes = [
            node for node in _list_eligible_nodes(cluster, resources) if node.name not in user_excluded
        ]
    except DtslurmError as error:
        return Checked(user_exclude, notes([*notices, f"no bad node is excluded: {error.message}"]))
    role_nodes = request.roles.nodes if request.roles else 0
    excluded_notes, needed_notes = nodes.choose_exclusions(
        list(notes_by_node.values()), listed_nodes, layout.nodes + (request.spare_nodes or 0) + role_nodes
    )
    if needed_notes:
        notices.append(
            "nodes of the bad-node list are not excluded, because the job could not run without them: "
            f"{_describe_notes(needed_notes)}"
        )
    if not excluded_notes:
        return Checked(user_exclude, notes(notices))
    notices.append(
        f"{pluralize(len(excluded_notes), 'bad node')} excluded: {_describe_notes(excluded_notes)}; "
        "--no-node-memory keeps bad nodes"
    )
    hostlist = _fold_hostlist([entry.node for entry in excluded_notes])
    return Checked(f"{user_exclude},{hostlist}" if user_exclude else hostlist, notes(notices))


def _list_eligible_nodes(cluster: ActiveCluster, resources: Resources) -> list[ListedNode]:
    """Return the nodes that the job may get: those of its partition with the features of its constraint."""
    profile = cluster.profile
    if not isinstance(cluster.scheduler, NodeLister):
        return []
    target = choose_destination(resources, profile)
    listed_nodes = cluster.scheduler.nodes(target.partition)
    constraint = target.constraint or ""
    if re.fullmatch(r"\w+(&\w+)*", constraint):
        return [node for node in listed_nodes if set(constraint.split("&")).issubset(node.features)]
    return listed_nodes


def _expand_hostlist(text: str | None) -> set[str]:
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return set(NodeSet(text or ""))
    except NodeSetException:
        return set()


def _fold_hostlist(names: Sequence[str]) -> str:
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))


def _describe_notes(notes: Sequence[NodeNote]) -> str:
    descriptions = []
    for entry in notes[:_MOST_LISTED]:
        date = time.strftime("%d %b", time.localtime(entry.when)).lstrip("0")
        descriptions.append(f"{entry.node} ({_truncate(entry.reason) or 'noted'} on {date})")
    remainder_text = f" and {len(notes) - _MOST_LISTED} more" if len(notes) > _MOST_LISTED else ""
    return ", ".join(descriptions) + remainder_text


def _truncate(text: str, max_length: int = 60) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def values(node_notes: NodeNotes) -> list[dict[str, Any]]:
    """Return the notes as JSON values, each with whether the team's file has the note, too."""
    return [{**plain(entry), "shared": entry.node in node_notes.shared} for entry in node_notes.notes]
