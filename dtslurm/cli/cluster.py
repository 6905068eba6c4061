"""``dtslurm cluster list | show | schema``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from dtslurm.cli import output
from dtslurm.cli.options import json_option
from dtslurm.services.context import Context


@click.group()
def cluster() -> None:
    """List and show cluster profiles, and print their schema."""


@cluster.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the profiles that can be named by --cluster."""
    from dtslurm.services.clusters import known

    context = Context()
    entries = known(context)
    default, why = context.default_cluster()
    if as_json:
        output.document(clusters=entries, default=default, default_because=why)
        return
    rows = [
        [
            f"{entry.name} *" if entry.name == default else entry.name,
            entry.title or "-",
            entry.error or str(entry.path),
        ]
        for entry in entries
    ]
    output.table(("CLUSTER", "WHAT IT IS", "PROFILE"), rows)
    output.note(f"* the default here: {why}")


@cluster.command()
@click.option("--live", is_flag=True, help="Completed by what the cluster's scheduler says.")
@json_option
@click.argument("name", required=False)
def show(live: bool, as_json: bool, name: str | None) -> None:
    """Show a profile's values and where each came from."""
    from dtslurm.store.codec import plain

    context = Context()
    found = context.live_cluster(name) if live else context.cluster(name)
    values = plain(found.profile)
    if as_json:
        output.document(profile=values, origins=found.origins)
        return
    rows = [[key, text, found.origins.get(key, "")] for key, text in _flat(values)]
    output.table(("KEY", "VALUE", "FROM"), rows)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every value that is set."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif value not in (None, "", []):
            yield path, json.dumps(value) if isinstance(value, list | bool) else str(value)


@cluster.command()
def schema() -> None:
    """Print the JSON Schema of profiles, for editors."""
    from dtslurm.services.clusters import schema_text

    click.echo(schema_text(), nl=False)
