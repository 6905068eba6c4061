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
from dtslurm.model.node_sets import fold_nodes
from dtslurm.services.wiring.context import Context

_cluster_option = click.option(
    "--cluster",
    "name",
    metavar="NAME",
    shell_complete=completers.clusters,
    help="Cluster profile. [default: as of submit]",
)


@click.group()
def cluster() -> None:
    """List, show, discover and prove cluster profiles, and tell of bad nodes."""


cluster.add_command(discover)
cluster.add_command(check)


@cluster.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the profiles that can be named by --cluster."""
    from dtslurm.services.wiring.clusters import known, label

    context = Context()
    entries = known(context)
    default, why = context.default_cluster()
    if as_json:
        told = [{**asdict(entry), "path": str(entry.path)} for entry in entries]
        output.document(clusters=told, default=default, default_because=why)
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
    output.note(f"* the default here: {why}")


@cluster.command()
@click.option("--live", is_flag=True, help="Completed by what the cluster's scheduler says.")
@click.option("--sources", "documents", is_flag=True, help="The document that each value is from, too.")
@json_option
@click.argument("name", required=False)
def show(live: bool, documents: bool, as_json: bool, name: str | None) -> None:
    """Show a profile's values and where each came from."""
    from dtslurm.services.wiring import clusters
    from dtslurm.store.codec import plain

    context = Context()
    found = context.live_cluster(name) if live else context.cluster(name)
    values = plain(found.profile)
    told = clusters.sources(context, str(found.path)) if documents or as_json else {}
    if as_json:
        output.document(profile=values, origins=found.origins, sources=told)
        return
    numbers = {document: number for number, document in enumerate(dict.fromkeys(told.values()), start=1)}
    rows = [
        [
            key,
            text,
            " ".join([found.origins.get(key, ""), *([f"[{numbers[told[key]]}]"] if key in told else [])]),
        ]
        for key, text in _flat(values)
    ]
    output.table(("KEY", "VALUE", "FROM"), rows)
    for document, number in numbers.items():
        output.say(f"[{number}] {document}")


@cluster.group(invoke_without_command=True)
@_cluster_option
@json_option
@click.pass_context
def nodes(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """List nodes that are known to be bad; or add and remove some.

    `dtslurm submit` leaves them out.

    They come from what runs found, from the verdicts of dtslurm diagnose, and by hand. Each is forgotten
    after some days.
    """
    ctx.obj = name
    if ctx.invoked_subcommand is not None:
        return
    from dtslurm.services.preflight import bad_nodes

    context = Context()
    where = context.cluster(name)
    found = bad_nodes.known(context, where)
    if as_json:
        output.document(cluster=where.name, nodes=bad_nodes.values(found), trouble=found.trouble)
        return
    if found.trouble:
        output.note(f"note: {found.trouble}")
    if not found.notes:
        output.note(f"nothing is said against any node of {where.name}")
        return
    now = context.clock()
    rows = [
        [
            one.node,
            one.reason or one.evidence or "-",
            one.job or "-",
            f"{one.by or '?'}{', in the team' if one.node in found.shared else ''}",
            f"{output.duration(max(0.0, now - one.when))} ago",
            output.duration(one.expires - now),
        ]
        for one in found.notes
    ]
    output.table(("NODE", "WHY", "JOB", "BY", "SEEN", "HOLDS"), rows)


@nodes.command()
@click.option("--reason", required=True, metavar="WORDS", help="What is wrong with it.")
@click.option("--expires", default="7d", metavar="TIME", help="Forget it after so long. [default: 7d]")
@_cluster_option
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.pass_context
def add(ctx: click.Context, reason: str, expires: str, name: str | None, names: tuple[str, ...]) -> None:
    """Note that nodes (n7, n[3-5]) are bad. `dtslurm submit` leaves them out."""
    from dtslurm.model.units import Walltime
    from dtslurm.services.preflight import bad_nodes

    try:
        holds = Walltime.parse(expires).seconds
    except ValueError as error:
        raise RequestInvalid([f"--expires: {error}"]) from None
    context = Context()
    where = context.cluster(name or ctx.obj)
    noted, trouble = bad_nodes.add(context, where, _expanded(names), reason, holds)
    until = output.duration(noted[0].expires - noted[0].when)
    output.note(f"{fold_nodes([one.node for one in noted])} of {where.name}: left out for {until}")
    if trouble:
        output.note(f"note: only for you: {trouble}")


@nodes.command()
@_cluster_option
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.pass_context
def remove(ctx: click.Context, name: str | None, names: tuple[str, ...]) -> None:
    """Forget what is said against nodes (n7, or n[3-5])."""
    from dtslurm.services.preflight import bad_nodes

    context = Context()
    where = context.cluster(name or ctx.obj)
    wanted = _expanded(names)
    gone, trouble = bad_nodes.remove(context, where, wanted)
    for text in sorted(set(wanted) - set(gone)):
        output.note(f"nothing was said against {text} of {where.name}")
    if gone:
        output.note(f"{', '.join(gone)} of {where.name}: nothing is said against it any more")
    if trouble:
        output.note(f"note: only for you: {trouble}")


def _expanded(names: tuple[str, ...]) -> list[str]:
    """Return single names of node sets.

    Raises:
        RequestInvalid: one is no node's name.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    from dtslurm.model.nodes import NODE_NAME

    found: list[str] = []
    problems = []
    for text in names:
        try:
            single = [str(one) for one in NodeSet(text)]
        except NodeSetException:
            single = []
        if not single or not all(NODE_NAME.fullmatch(one) for one in single):
            problems.append(f"{text!r} is no node's name; write n7 or n[3-5]")
        found += single
    if problems:
        raise RequestInvalid(problems)
    return found


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every value that is set."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif value not in (None, "", []):
            yield path, json.dumps(value) if isinstance(value, list | bool) else str(value)


@cluster.command()
@click.argument("kind", type=click.Choice(["profile", "job"]), default="profile")
def schema(kind: str) -> None:
    """Print the JSON Schema of profiles, or of job files, for editors."""
    from dtslurm.services.wiring.clusters import schema_text

    click.echo(schema_text(kind), nl=False)
