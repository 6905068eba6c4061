"""``dtslurm cluster list | show | discover | check | nodes | schema``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from dtslurm.cli import completers
from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output
from dtslurm.cli.setup.discover import check, discover
from dtslurm.errors import RequestInvalid
from dtslurm.model.units import Walltime
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.presentation.quantities import duration
from dtslurm.services.wiring.context import Context
from dtslurm.store.codec import plain

_cluster_option = click.option(
    "--cluster",
    "name",
    metavar="NAME",
    shell_complete=completers.complete_clusters,
    help="Use this profile. [default: as for submit]",
)


@click.group()
def cluster() -> None:
    """List, show, discover and check cluster profiles; edit the bad-node list."""


cluster.add_command(discover)
cluster.add_command(check)


@cluster.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the profiles that --cluster accepts."""
    from dtslurm.services.wiring.clusters import known, label

    context = Context()
    entries = known(context)
    default, default_reason = context.default_cluster()
    if as_json:
        cluster_values = [{**asdict(entry), "path": str(entry.path)} for entry in entries]
        output.document(clusters=cluster_values, default=default, default_because=default_reason)
        return
    rows = [
        [
            f"{entry.name} *" if entry.name == default else entry.name,
            entry.title or "-",
            entry.error or label(context, entry.path),
            entry.checked or "-",
        ]
        for entry in entries
    ]
    output.table(("CLUSTER", "WHAT IT IS", "PROFILE", "CHECKED"), rows)
    output.note(f"* the default here: {default_reason}")


@cluster.command()
@click.option("--live", is_flag=True, help="Add values that the cluster's scheduler reports.")
@click.option("--sources", "documents", is_flag=True, help="Show also the document that each value is from.")
@json_option
@click.argument("name", required=False)
def show(live: bool, documents: bool, as_json: bool, name: str | None) -> None:
    """Show the values of a profile and the source of each value."""
    from dtslurm.services.wiring import clusters

    context = Context()
    active_cluster = context.live_cluster(name) if live else context.cluster(name)
    values = plain(active_cluster.profile)
    sources_by_key = clusters.sources(context, str(active_cluster.path)) if documents or as_json else {}
    if as_json:
        output.document(profile=values, origins=active_cluster.origins, sources=sources_by_key)
        return
    numbers = {
        document: number for number, document in enumerate(dict.fromkeys(sources_by_key.values()), start=1)
    }
    rows = [
        [
            key,
            text,
            " ".join(
                [
                    active_cluster.origins.get(key, ""),
                    *([f"[{numbers[sources_by_key[key]]}]"] if key in sources_by_key else []),
                ]
            ),
        ]
        for key, text in _flatten(values)
    ]
    output.table(("KEY", "VALUE", "FROM"), rows)
    for document, number in numbers.items():
        output.say(f"[{number}] {document}")


@cluster.group(invoke_without_command=True)
@_cluster_option
@json_option
@click.pass_context
def nodes(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """List the nodes of the bad-node list; or add and remove nodes.

    `dtslurm submit` excludes these nodes.

    Runs, dtslurm diagnose and users add nodes to the list. Each entry expires after some days.
    """
    ctx.obj = name
    if ctx.invoked_subcommand is not None:
        return
    from dtslurm.services.preflight import bad_nodes

    context = Context()
    active_cluster = context.cluster(name)
    bad_node_list = bad_nodes.read_notes(context, active_cluster)
    if as_json:
        output.document(
            cluster=active_cluster.name, nodes=bad_nodes.values(bad_node_list), trouble=bad_node_list.trouble
        )
        return
    if bad_node_list.trouble:
        output.note(f"note: {bad_node_list.trouble}")
    if not bad_node_list.notes:
        output.note(f"the bad-node list of {active_cluster.name} is empty")
        return
    now = context.clock()
    rows = [
        [
            bad_node.node,
            bad_node.reason or bad_node.evidence or "-",
            bad_node.job or "-",
            f"{bad_node.by or '?'}{', in the team' if bad_node.node in bad_node_list.shared else ''}",
            f"{duration(max(0.0, now - bad_node.when))} ago",
            duration(bad_node.expires - now),
        ]
        for bad_node in bad_node_list.notes
    ]
    output.table(("NODE", "WHY", "JOB", "BY", "SEEN", "HOLDS"), rows)


@nodes.command()
@click.option("--reason", required=True, metavar="WORDS", help="State what is wrong with the nodes.")
@click.option(
    "--expires", default="7d", metavar="TIME", help="Remove the nodes after this time. [default: 7d]"
)
@_cluster_option
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.pass_context
def add(ctx: click.Context, reason: str, expires: str, name: str | None, names: tuple[str, ...]) -> None:
    """Add nodes (n7, n[3-5]) to the bad-node list. `dtslurm submit` excludes them."""
    from dtslurm.services.preflight import bad_nodes

    try:
        duration_s = Walltime.parse(expires).seconds
    except ValueError as error:
        raise RequestInvalid([f"--expires: {error}"]) from None
    context = Context()
    active_cluster = context.cluster(name or ctx.obj)
    added, trouble = bad_nodes.add(context, active_cluster, _expand_node_sets(names), reason, duration_s)
    duration_text = duration(added[0].expires - added[0].when)
    output.note(
        f"{fold_nodes([bad_node.node for bad_node in added])} of {active_cluster.name}: excluded for "
        f"{duration_text}"
    )
    if trouble:
        output.note(f"note: only your own list was changed: {trouble}")


@nodes.command()
@_cluster_option
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.pass_context
def remove(ctx: click.Context, name: str | None, names: tuple[str, ...]) -> None:
    """Remove nodes (n7, or n[3-5]) from the bad-node list."""
    from dtslurm.services.preflight import bad_nodes

    context = Context()
    active_cluster = context.cluster(name or ctx.obj)
    node_names = _expand_node_sets(names)
    removed, trouble = bad_nodes.remove(context, active_cluster, node_names)
    for text in sorted(set(node_names) - set(removed)):
        output.note(f"{text} is not on the bad-node list of {active_cluster.name}")
    if removed:
        output.note(f"{', '.join(removed)} of {active_cluster.name}: removed from the bad-node list")
    if trouble:
        output.note(f"note: only your own list was changed: {trouble}")


def _expand_node_sets(names: tuple[str, ...]) -> list[str]:
    """Expand node sets to names of single nodes.

    Raises:
        RequestInvalid: a name is not a valid node name.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    from dtslurm.model.nodes import NODE_NAME

    node_names: list[str] = []
    problems = []
    for text in names:
        try:
            expanded = [str(node) for node in NodeSet(text)]
        except NodeSetException:
            expanded = []
        if not expanded or not all(NODE_NAME.fullmatch(node) for node in expanded):
            problems.append(f"{text!r} is not a node name; write n7 or n[3-5]")
        node_names += expanded
    if problems:
        raise RequestInvalid(problems)
    return node_names


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every value that is set."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.")
        elif value not in (None, "", []):
            yield path, json.dumps(value) if isinstance(value, list | bool) else str(value)


@cluster.command()
@click.argument("kind", type=click.Choice(["profile", "job"]), default="profile")
def schema(kind: str) -> None:
    """Print the JSON Schema of profiles, or of job files, for editors."""
    from dtslurm.services.wiring.clusters import schema_text

    click.echo(schema_text(kind), nl=False)
