"""``dtslurm cluster discover | check``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtslurm.cli import completers
from dtslurm.cli.options import json_option, transport_option
from dtslurm.cli.printing import output
from dtslurm.errors import ProfileNotFound
from dtslurm.logs.clean import safe
from dtslurm.model.paths import expand_home
from dtslurm.services.wiring.context import ActiveCluster, Context

if TYPE_CHECKING:
    from dtslurm.services.clusters.discover import Discovery

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MAX_SHOWN = 20


_SMALL_JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--probe/--no-probe", default=True, help="Examine nodes with small jobs."),
    click.option("-A", "--account", metavar="NAME", help="Charge these small jobs to this account."),
    click.option("-q", "--qos", metavar="NAME", help="Set the QOS of these jobs."),
    click.option(
        "--wait",
        default=120.0,
        show_default=True,
        type=click.FloatRange(0, 86400),
        metavar="SECONDS",
        help="Wait this long for these jobs to start.",
    ),
)


def small_job_options(command: _Command) -> _Command:
    """Add the options for the small jobs that examine nodes."""
    for add_option in reversed(_SMALL_JOB_OPTIONS):
        command = add_option(command)
    return command


@click.command()
@click.argument("host", required=False)
@click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=completers.complete_clusters,
    help="Use this profile's connection instead of HOST.",
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the profile to this file.",
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    metavar="NAME",
    multiple=True,
    help="Examine nodes of this partition; repeatable.",
)
@small_job_options
@click.option("-y", "--yes", is_flag=True, help="Change an existing file without asking.")
@transport_option
@json_option
def discover(
    host: str | None,
    cluster: str | None,
    path: Path | None,
    partitions: tuple[str, ...],
    probe: bool,
    account: str | None,
    qos: str | None,
    wait: float,
    yes: bool,
    transport: str | None,
    as_json: bool,
) -> None:
    """Write a profile of the local Slurm, or of the login node HOST.

    Each value has its evidence in a comment. Without -o, the profile is printed to stdout. If the file
    exists, your edits are kept, the difference is shown, and nothing is written until you agree.
    """
    from dtslurm.services.clusters import discover as service
    from dtslurm.services.clusters import profile_file

    if host and cluster:
        raise click.UsageError("give HOST or --cluster, not both")
    context = Context()
    active_cluster = (
        context.cluster(cluster, transport) if cluster else context.cluster_without_profile(host, transport)
    )
    _require_slurm(active_cluster)
    target = None if path is None else _check_profile_path(context, path)
    existing_text = profile_file.existing(target) if target else None
    extends = profile_file.extended_by(existing_text, str(target)) if existing_text is not None else None
    options = service.DiscoverOptions(
        partitions=partitions, probe=probe, account=account, qos=qos, wait_s=wait, extends=extends
    )
    login_host = host or (active_cluster.profile.login.host if active_cluster.remote else None)
    discovery = service.discover(
        context,
        active_cluster,
        options,
        host=login_host,
        own_path=target,
        report_progress=output.note,
    )
    for line in discovery.found.notices:
        output.note(f"notice: {line}")
    is_written = False
    if target is not None:
        is_written = write_profile(context, target, existing_text, discovery, yes=yes)
    if as_json:
        _print_json(discovery, target, is_written=is_written)
    elif target is None:
        click.echo("\n".join(map(safe, discovery.text.split("\n"))), nl=False)
        words = [
            "-o",
            f"cluster_profiles/{discovery.name}.yaml",
            *(["--cluster", cluster] if cluster else []),
        ]
        words += [host] if host else []
        output.note(f"save the profile: dtslurm cluster discover {shlex.join(words)}")
    if (
        target is not None
        and existing_text is not None
        and not is_written
        and not as_json
        and discovery.text != existing_text
    ):
        output.note(f"{target} was not changed")


def _require_slurm(active_cluster: ActiveCluster) -> None:
    if active_cluster.profile.scheduler == "local":
        raise click.UsageError(
            f"cluster {active_cluster.name} is this machine without Slurm; see dtslurm doctor"
        )


def _check_profile_path(context: Context, path: Path) -> Path:
    """Return the absolute path of the file to write, in the form in which dtslurm finds profiles."""
    absolute_path = Path(os.path.normpath(context.cwd / expand_home(path)))
    if absolute_path.is_dir():
        raise click.UsageError(f"{path} is a folder; name a file, such as {path}/mycluster.yaml")
    if path.suffix not in {".yaml", ".yml"}:
        raise click.UsageError(f"{path}: the file name of a profile must end in .yaml")
    return absolute_path


def _format_cluster_argument(context: Context, path: Path) -> str:
    """Return the value of --cluster for a profile's file: its name, if that leads to the file."""
    from dtslurm.config import profiles

    try:
        is_found = profiles.find(path.stem, cwd=context.cwd, env=context.env) == path
    except ProfileNotFound:
        is_found = False
    return shlex.quote(path.stem if is_found else str(path))


def write_profile(
    context: Context, path: Path, old_text: str | None, discovery: Discovery, *, yes: bool
) -> bool:
    """Write a new profile, or update an existing one if the user agrees; return whether it was written."""
    from dtslurm.services.clusters import profile_file

    if old_text is None:
        profile_file.save(context, path, discovery.text)
        output.note(
            f"wrote {path}: {len(discovery.found.facts)} values; verify it with dtslurm cluster check "
            f"{_format_cluster_argument(context, path)}"
        )
        return True
    update = profile_file.amend_profile(old_text, discovery.found, str(path))
    for name, current_value, found_value in update.yours[:_MAX_SHOWN]:
        output.note(f"your value is kept: {name} is {current_value}, found {found_value}")
    if len(update.yours) > _MAX_SHOWN:
        output.note(f"and {len(update.yours) - _MAX_SHOWN} more of your values are kept")
    for name in update.missed:
        output.note(
            f"cannot be inserted automatically, edit the file: {name}: {discovery.found.text_of(name)}"
        )
    if not update.changed and not update.added:
        output.note(f"{path}: no new values")
        return False
    _show_difference(old_text, update.text, path)
    if not yes:
        if not sys.stdin.isatty():
            output.note("not written: there is no terminal for the confirmation; --yes confirms in advance")
            return False
        if not click.confirm(f"Change {path}?", default=False, err=True):
            return False
    profile_file.save(context, path, update.text)
    output.note(f"changed {len(update.changed)} and added {len(update.added)} values in {path}")
    return True


def _show_difference(old_text: str, new_text: str, path: Path) -> None:
    """Print the difference between the old and the new profile."""
    import difflib

    from dtslurm.discover.page import without_memory

    old_lines, new_lines = without_memory(old_text).splitlines(), without_memory(new_text).splitlines()
    for line in difflib.unified_diff(old_lines, new_lines, str(path), f"{path} (new)", lineterm="", n=1):
        output.note(line)


def _print_json(discovery: Discovery, path: Path | None, *, is_written: bool) -> None:
    output.document(
        name=discovery.name,
        extends=discovery.extends,
        slurm_version=discovery.survey.version or None,
        cluster=discovery.survey.cluster or None,
        nodes=len(discovery.survey.nodes),
        node_types={discovery.names[kind.name]: len(kind.nodes) for kind in discovery.kinds},
        facts=[
            {"key": fact.name, "value": fact.value, "evidence": fact.evidence, "confidence": fact.sure}
            for fact in discovery.found.facts
        ],
        notices=discovery.found.notices,
        probes=discovery.probes,
        path=str(path) if path else None,
        written=is_written,
        profile=discovery.text,
    )


@click.command()
@click.argument("name", required=False, shell_complete=completers.complete_clusters)
@click.option(
    "-p",
    "--partition",
    "partitions",
    metavar="NAME",
    multiple=True,
    help="Check only this partition; repeatable.",
)
@click.option(
    "-l",
    "--launcher",
    "launchers",
    metavar="NAME",
    multiple=True,
    help="Dry-run jobs of this launcher. [default: all]",
)
@small_job_options
@click.option("--fabric/--no-fabric", default=True, help="Measure the network between two nodes.")
@transport_option
@json_option
def check(
    name: str | None,
    partitions: tuple[str, ...],
    launchers: tuple[str, ...],
    probe: bool,
    fabric: bool,
    account: str | None,
    qos: str | None,
    wait: float,
    transport: str | None,
    as_json: bool,
) -> None:
    """Check a profile against its cluster. Exits with 1 if a value is wrong.

    The values are compared with Slurm's and with those that small jobs measure on the nodes; a job of every
    launcher is dry-run in every partition; one job measures the network between two nodes.
    """
    from dtslurm.services.clusters import verify_profile as service
    from dtslurm.services.clusters.discover import DiscoverOptions

    context = Context()
    active_cluster = context.cluster(name, transport)
    _require_slurm(active_cluster)
    options = DiscoverOptions(
        partitions=partitions, probe=probe, fabric=fabric, account=account, qos=qos, wait_s=wait
    )
    proof = service.verify_profile(
        context,
        active_cluster,
        options,
        launchers=launchers,
        transport=transport,
        report_progress=output.note,
    )
    for line in proof.notices:
        output.note(f"notice: {line}")
    if as_json:
        output.document(
            ok=proof.ok, cluster=proof.name, claims=proof.rows, notices=proof.notices, probes=proof.probes
        )
    else:
        styles = {"differs": "bold red", "ok": "green", "notice": "yellow"}
        output.table(("VERDICT", "WHAT", "CLAIM", "FOUND"), list(service.lines(proof)), styles)
        counts = {
            verdict: sum(row.verdict == verdict for row in proof.rows)
            for verdict in ("ok", "differs", "unknown")
        }
        output.note(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    if not proof.ok:
        raise click.exceptions.Exit(1)
