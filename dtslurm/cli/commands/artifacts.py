"""``dtslurm artifacts list | show | pin | unpin | prune | pull``."""

from __future__ import annotations

from pathlib import Path

import click

from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.errors import RequestInvalid
from dtslurm.model.paths import expand_home
from dtslurm.presentation.quantities import format_any_value, format_bytes
from dtslurm.services.results import artifacts as service
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context


@click.group()
def artifacts() -> None:
    """List, pin and download checkpoints and results of runs."""


@artifacts.command("list")
@cluster_option
@json_option
@click.argument("job")
def list_(cluster: str | None, as_json: bool, job: str) -> None:
    """List the checkpoints and results of JOB."""
    context = Context()
    artifacts_of_run = service.listing(context, find(context, job, cluster))
    if as_json:
        output.document(artifacts=artifacts_of_run)
        return
    if not artifacts_of_run:
        output.note(
            "the run has no registered artifacts; register files with dtslurm.train, --artifact PATTERN "
            "or $DTSLURM_ARTIFACTS"
        )
        return
    rows = [
        [
            artifact.kind,
            "-" if artifact.step is None else str(artifact.step),
            "-" if artifact.bytes is None else format_bytes(artifact.bytes),
            " ".join(f"{key}={format_any_value(value)}" for key, value in artifact.metrics.items()) or "-",
            " ".join(filter(None, ["pinned" if artifact.pinned else "", artifact.problem])) or "-",
            artifact.path,
        ]
        for artifact in artifacts_of_run
    ]
    output.table(("KIND", "STEP", "SIZE", "METRICS", "NOTE", "PATH"), rows)


@artifacts.command()
@click.option("--check", is_flag=True, help="Read each artifact completely and compare its checksum.")
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def show(check: bool, cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Show details of results of JOB. PATH may be a pattern, or latest."""
    from dtslurm.services.results.export import document

    context = Context()
    record = find(context, job, cluster)
    selected = service.select_artifacts(service.listing(context, record), patterns)
    if check:
        names = [artifact.path for artifact in selected]
        selected = [
            artifact for artifact in service.listing(context, record, names) if artifact.path in names
        ]
    if as_json:
        output.document(artifacts=selected)
        return
    for artifact in selected:
        for line in document(artifact):
            output.say(line)


def _change_pins(
    job: str, patterns: tuple[str, ...], cluster: str | None, as_json: bool, *, should_pin: bool
) -> None:
    """Pin the results that match the patterns, or unpin them."""
    context = Context()
    record = find(context, job, cluster)
    names = [
        artifact.path for artifact in service.select_artifacts(service.listing(context, record), patterns)
    ]
    pinned = service.pin(context, record, names, keep=should_pin)
    if as_json:
        output.document(pinned=pinned)
        return
    output.note(f"{'pinned' if should_pin else 'unpinned'}: {', '.join(names)}")


@artifacts.command()
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def pin(cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Pin results of JOB. Neither training, prune nor clean deletes them."""
    _change_pins(job, patterns, cluster, as_json, should_pin=True)


@artifacts.command()
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, required=True, metavar="PATH...")
def unpin(cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Unpin results of JOB."""
    _change_pins(job, patterns, cluster, as_json, should_pin=False)


@artifacts.command()
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), default=1, help="Keep N checkpoints. [default: 1]"
)
@click.option(
    "--best", metavar="METRIC", help="Keep the best by this metric, smallest first, and the newest."
)
@click.option("--largest", is_flag=True, help="Treat larger values of the metric as better.")
@click.option("--yes", is_flag=True, help="Delete. Without --yes, only list what would be deleted.")
@cluster_option
@json_option
@click.argument("job")
def prune(
    keep: int, best: str | None, largest: bool, yes: bool, cluster: str | None, as_json: bool, job: str
) -> None:
    """Delete checkpoints of JOB except the newest or best. Pinned ones stay."""
    context = Context()
    to_delete = service.prune(context, find(context, job, cluster), keep, best, largest=largest, remove=yes)
    if as_json:
        output.document(deleted=yes, artifacts=to_delete)
        return
    for artifact in to_delete:
        output.say(artifact.path)
    total = format_bytes(sum(artifact.bytes or 0 for artifact in to_delete))
    if not to_delete:
        output.note("no artifact to delete")
    elif yes:
        output.note(f"deleted; {total} freed")
    else:
        output.note(f"{total} would be freed; nothing was deleted, because --yes was not given")


@artifacts.command()
@click.option(
    "--to",
    "target",
    metavar="DIR|hf:DIR|mlflow:NAME",
    help="Write a folder, a Hugging Face layout or a version in MLflow's registry.",
)
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, metavar="[PATH]...")
def pull(target: str | None, cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]) -> None:
    """Download results of JOB and verify their checksums.

    Without PATH, the newest checkpoint is downloaded.
    """
    from dtslurm.services.results import export

    context = Context()
    record = find(context, job, cluster)
    selected = service.select_artifacts(service.listing(context, record), patterns or ("latest",))
    kind, destination = export.target_of(target or f"{Path(record.run_dir).name}-artifacts")
    if kind == "hf" and len(selected) != 1:
        raise RequestInvalid([f"--to hf: needs a single artifact, and {len(selected)} match"])
    folder = context.cwd / expand_home(destination)
    # An export reads files of this machine: in the run directory if it is here, otherwise in a copy, which
    # stays in the working directory.
    if kind != "folder":
        run_dir = Path(record.run_dir)
        folder = run_dir if run_dir.is_dir() else context.cwd / f"{run_dir.name}-artifacts"
    with transfer() as progress:
        local_paths = service.pull(
            context,
            record,
            selected,
            folder,
            lambda path, copied_bytes, total_bytes: progress(path.name, copied_bytes, total_bytes),
        )
    outputs: list[str] = [str(path) for path in local_paths]
    if kind == "hf":
        layout_paths = export.hugging_face(
            record, selected[0], local_paths[0], context.cwd / expand_home(destination)
        )
        outputs = [str(path) for path in layout_paths]
    elif kind == "mlflow":
        outputs = export.mlflow(record, selected, local_paths, destination, context.env)
    if as_json:
        output.document(to=target, files=outputs)
        return
    for line in outputs:
        output.say(line if kind != "mlflow" else f"{destination} version {line}")
