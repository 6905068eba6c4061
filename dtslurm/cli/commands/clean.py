"""``dtslurm clean``."""

from __future__ import annotations

from datetime import datetime

import click

from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.model.units import Walltime
from dtslurm.presentation.quantities import duration, format_bytes, pluralize
from dtslurm.services.runs.clean import CleanRoot, CodeOutputs, age_used
from dtslurm.services.runs.clean import clean as clean_runs
from dtslurm.services.wiring.context import Context

_NAMES_SHOWN = 10  # maximum number of kept files in a message; all known deleted files are listed


@click.command()
@click.option(
    "--older-than",
    default="30d",
    metavar="TIME",
    help="Select runs that ended more than TIME ago. [default: 30d]",
)
@click.option(
    "--runs", "whole_runs", is_flag=True, help="Delete whole run directories, with logs and results."
)
@click.option("--outputs", is_flag=True, help="Delete also files that the jobs wrote beside their code.")
@click.option("--yes", is_flag=True, help="Delete. Without --yes, only list what would be deleted.")
@cluster_option
@json_option
def clean(
    older_than: str, whole_runs: bool, outputs: bool, yes: bool, cluster: str | None, as_json: bool
) -> None:
    """Delete the code and secrets of ended runs, and stored file contents that no run uses.

    Pending and running runs, and runs whose end is unknown, are never changed. --runs keeps runs that a
    remaining run continues from or belongs to. Files that the job wrote or changed in the code folder are
    listed and kept; --outputs deletes them too. Without --yes, nothing is deleted.
    """
    try:
        age = Walltime.parse(older_than).seconds
    except ValueError as error:
        raise RequestInvalid([f"--older-than: {error}"]) from None
    minimum_age = age_used(age)
    if minimum_age > age:
        requested, older_than = older_than, duration(minimum_age)
        output.note(
            f"--older-than {requested}: {older_than} is used, because a job can be requeued for this "
            "time after its end"
        )
    roots = clean_runs(
        Context(), older_than=age, whole_runs=whole_runs, outputs=outputs, remove=yes, cluster=cluster
    )
    if as_json:
        output.document(deleted=yes, roots=roots)
        return
    _show(roots, whole_runs=whole_runs)
    for root in roots:
        for item in root.outputs:
            output.note(
                f"{root.root}/{item.folder}/code: {_describe_outputs(item, deleted=outputs, confirmed=yes)}"
            )
    total = sum(root.bytes for root in roots)
    if yes:
        output.note(f"deleted; {format_bytes(total)} freed")
    elif any(root.runs or root.objects or root.unfinished for root in roots):
        output.note(f"{format_bytes(total)} would be freed; nothing was deleted, because --yes was not given")
    else:
        output.note(f"runs that ended more than {older_than} ago have nothing to delete")


def _show(roots: list[CleanRoot], *, whole_runs: bool) -> None:
    rows = [
        [
            run.job_id or "?",
            run.name,
            root.cluster,
            datetime.fromtimestamp(run.ended).strftime("%Y-%m-%d"),
            format_bytes(run.bytes),
            f"{root.root}/{run.folder}" + ("" if whole_runs else "/code"),
        ]
        for root in roots
        for run in root.runs
    ]
    if rows:
        output.table(("JOB", "NAME", "CLUSTER", "ENDED", "SIZE", "FOLDER"), rows)
    for root in roots:
        if root.objects:
            output.note(
                f"{root.root}: {root.objects} file contents, {format_bytes(root.objects_bytes)}, not "
                "used by any run"
            )
        for path in root.unfinished:
            output.note(f"{path}: from a submission that was killed")
        for name in root.pinned:
            kept_text = "kept" if whole_runs else "files that the job wrote in code/ are kept"
            output.note(
                f"{root.root}/{name}: {kept_text}, because results in it are pinned (dtslurm artifacts unpin)"
            )
        for name, blocker in root.needed.items():
            output.note(
                f"{root.root}/{name}: kept, because job {blocker} continues from it "
                "or belongs to it and is kept"
            )
        for line in root.trouble:
            output.note(f"{root.cluster}: {line}")


def _describe_outputs(item: CodeOutputs, *, deleted: bool, confirmed: bool) -> str:
    """Describe the files that a job wrote beside its code, and whether they are deleted."""
    names = item.names if deleted else item.names[:_NAMES_SHOWN]
    remainder = f" and {item.files - len(names)} more" if item.files > len(names) else ""
    if deleted:
        action, hint = "deleted" if confirmed else "would delete", ""
    else:
        action, hint = "kept", " (--outputs deletes them)"
    files_text = f"{pluralize(item.files, 'file')}, {format_bytes(item.bytes)}, that the job wrote there"
    return f"{action} {files_text}{hint}: {', '.join(names)}{remainder}"
