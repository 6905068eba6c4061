"""``dtslurm fetch``."""

from __future__ import annotations

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.model.paths import expand_home
from dtslurm.presentation.quantities import format_bytes, pluralize
from dtslurm.services.results.fetch import SkippedFiles
from dtslurm.services.results.fetch import fetch as fetch_files
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.wiring.context import Context

_NAMES_SHOWN = 10


@click.command()
@click.option(
    "-o", "--output", "target", metavar="DIR", help="Download to DIR. [default: a folder of the run's name]"
)
@click.option("--sync", "upload", is_flag=True, help="Upload offline W&B data; needs wandb on this machine.")
@cluster_option
@json_option
@click.argument("job", shell_complete=completers.complete_jobs)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
def fetch(
    target: str | None,
    upload: bool,
    cluster: str | None,
    as_json: bool,
    job: str,
    patterns: tuple[str, ...],
) -> None:
    """Download logs, checkpoints and results of JOB; only new data is copied.

    PATTERN matches paths in the run directory, such as 'checkpoints/*'. Without PATTERN, all files except the
    submitted code are copied, also those that the job wrote beside the code. For an array task (17_3),
    PATTERN matches paths in the folder of the task. The values of --secret are never copied.
    """
    context = Context()
    record = find(context, job, cluster)
    folder = context.cwd / expand_home(target) if target else None
    with transfer() as show:
        fetched = fetch_files(
            context,
            record,
            patterns,
            folder,
            lambda path, copied_bytes, total_bytes: show(path.name, copied_bytes, total_bytes),
            task_of(job, record),
        )
    synced = None
    if upload:
        from dtslurm.services.request.experiment_trackers import sync

        synced = sync(context, record, fetched.folder)
    if as_json:
        output.document(
            folder=str(fetched.folder),
            files=[str(p) for p in fetched.files],
            bytes=fetched.bytes,
            left_out=fetched.left_out,
            **({"uploaded": [str(p) for p in synced.uploaded], "left": synced.left} if synced else {}),
        )
        return
    if not fetched.files:
        output.note(f"no new files; all files are already in {fetched.folder}")
    else:
        output.note(
            f"{pluralize(len(fetched.files), 'file')}, {format_bytes(fetched.bytes)}, in {fetched.folder}"
        )
    for item in fetched.left_out:
        output.note(_describe_skipped(item))
    if synced:
        count = len(synced.uploaded)
        output.note(f"uploaded {pluralize(count, 'W&B run')}" if count else "no W&B run to upload")
        for line in synced.left:
            output.note(f"  {line}")


def _describe_skipped(item: SkippedFiles) -> str:
    """Describe the files that were not fetched, and why."""
    shown_names = item.names[:_NAMES_SHOWN]
    remainder = f" and {item.files - len(shown_names)} more" if item.files > len(shown_names) else ""
    names = f": {', '.join(shown_names)}{remainder}" if shown_names else ""
    return f"skipped: {item.reason}{names}"
