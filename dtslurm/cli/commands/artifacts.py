"""``dtslurm artifacts list | show | pin | unpin | prune | pull``."""

from __future__ import annotations

from pathlib import Path

import click

from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.errors import RequestInvalid
from dtslurm.model.paths import expanded
from dtslurm.services.results import artifacts as service
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context


@click.group()
def artifacts() -> None:
    """Show, keep and bring here what runs made: checkpoints and results."""


@artifacts.command("list")
@cluster_option
@json_option
@click.argument("job")
def list_(cluster: str | None, as_json: bool, job: str) -> None:
    """List the checkpoints and results of JOB."""
    context = Context()
    found = service.listing(context, find(context, job, cluster))
    if as_json:
        output.document(artifacts=found)
        return
    if not found:
        output.note("nothing is registered; dtslurm.train does so, --artifact PATTERN, or $DTSLURM_ARTIFACTS")
        return
    rows = [
        [
            one.kind,
            "-" if one.step is None else str(one.step),
            "-" if one.bytes is None else output.size(one.bytes),
            " ".join(f"{key}={_short(value)}" for key, value in one.metrics.items()) or "-",
            " ".join(filter(None, ["pinned" if one.pinned else "", one.problem])) or "-",
            one.path,
        ]
        for one in found
    ]
    output.table(("KIND", "STEP", "SIZE", "METRICS", "NOTE", "PATH"), rows)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@artifacts.command()
@click.option("--check", is_flag=True, help="Read it whole, and compare its checksum.")
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def show(check: bool, cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Show what is known of some results of JOB. PATH may be a pattern, or latest."""
    from dtslurm.services.results.export import document

    context = Context()
    record = find(context, job, cluster)
    found = service.chosen(service.listing(context, record), patterns)
    if check:
        names = [one.path for one in found]
        found = [one for one in service.listing(context, record, names) if one.path in names]
    if as_json:
        output.document(artifacts=found)
        return
    for one in found:
        for line in document(one):
            output.say(line)


def _pin(job: str, patterns: tuple[str, ...], cluster: str | None, as_json: bool, *, keep: bool) -> None:
    context = Context()
    record = find(context, job, cluster)
    names = [one.path for one in service.chosen(service.listing(context, record), patterns)]
    pinned = service.pin(context, record, names, keep=keep)
    if as_json:
        output.document(pinned=pinned)
        return
    output.note(f"{'pinned' if keep else 'let go'}: {', '.join(names)}")


@artifacts.command()
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def pin(cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Keep some results of JOB. Neither training, prune nor clean deletes them."""
    _pin(job, patterns, cluster, as_json, keep=True)


@artifacts.command()
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def unpin(cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Let pinned results of JOB go."""
    _pin(job, patterns, cluster, as_json, keep=False)


@artifacts.command()
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), default=1, help="How many checkpoints. [default: 1]"
)
@click.option(
    "--best", metavar="METRIC", help="Keep the best by this metric, smallest first, and the newest."
)
@click.option("--largest", is_flag=True, help="More of the metric is better.")
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be.")
@cluster_option
@json_option
@click.argument("job")
def prune(
    keep: int, best: str | None, largest: bool, yes: bool, cluster: str | None, as_json: bool, job: str
) -> None:
    """Delete the checkpoints of JOB but the newest or best. Pinned ones stay."""
    context = Context()
    gone = service.prune(context, find(context, job, cluster), keep, best, largest=largest, remove=yes)
    if as_json:
        output.document(deleted=yes, artifacts=gone)
        return
    for one in gone:
        output.say(one.path)
    total = output.size(sum(one.bytes or 0 for one in gone))
    if not gone:
        output.note("there is nothing to delete")
    elif yes:
        output.note(f"deleted; {total} are free again")
    else:
        output.note(f"{total} would be free again; nothing was deleted: --yes does that")


@artifacts.command()
@click.option(
    "--to",
    "target",
    metavar="DIR|hf:DIR|mlflow:NAME",
    help="A folder, a Hugging Face layout, MLflow's registry.",
)
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, metavar="[PATH]...")
def pull(target: str | None, cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Bring results of JOB here, held against their checksums.

    Where no PATH is given, it is the newest checkpoint.
    """
    from dtslurm.services.results import export

    context = Context()
    record = find(context, job, cluster)
    wanted = service.chosen(service.listing(context, record), patterns or ("latest",))
    kind, rest = export.target_of(target or f"{Path(record.run_dir).name}-artifacts")
    if kind == "hf" and len(wanted) != 1:
        raise RequestInvalid([f"--to hf: takes one artifact, and {len(wanted)} match"])
    folder = context.cwd / expanded(rest)
    if kind != "folder":  # they are there already, or come into a folder of the run's name, to be kept
        there = Path(record.run_dir)
        folder = there if there.is_dir() else context.cwd / f"{there.name}-artifacts"
    with transfer() as progress:
        places = service.pull(
            context, record, wanted, folder, lambda path, done, size: progress(path.name, done, size)
        )
    made: list[str] = [str(path) for path in places]
    if kind == "hf":
        laid = export.hugging_face(record, wanted[0], places[0], context.cwd / expanded(rest))
        made = [str(path) for path in laid]
    elif kind == "mlflow":
        made = export.mlflow(record, wanted, places, rest, context.env)
    if as_json:
        output.document(to=target, files=made)
        return
    for line in made:
        output.say(line if kind != "mlflow" else f"{rest} version {line}")
