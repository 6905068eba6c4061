"""``dtslurm fetch``."""

from __future__ import annotations

from pathlib import Path

import click

from dtslurm.cli import output
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.progress import transfer
from dtslurm.services.context import Context
from dtslurm.services.fetch import fetch as bring
from dtslurm.services.status import find


@click.command()
@click.option(
    "-o", "--output", "target", metavar="DIR", help="Where to. [default: a folder of the run's name]"
)
@cluster_option
@json_option
@click.argument("job")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
def fetch(
    target: str | None, cluster: str | None, as_json: bool, job: str, patterns: tuple[str, ...]
) -> None:
    """Bring logs, checkpoints and results of JOB here; only what is new travels.

    PATTERN is of paths in the run directory, such as 'checkpoints/*'; without one, all but the code.
    """
    context = Context()
    record = find(context, job, cluster)
    folder = context.cwd / Path(target).expanduser() if target else None
    with transfer() as show:
        fetched = bring(
            context, record, patterns, folder, lambda path, done, size: show(path.name, done, size)
        )
    if as_json:
        output.document(
            folder=str(fetched.folder), files=[str(p) for p in fetched.files], bytes=fetched.bytes
        )
        return
    if not fetched.files:
        output.note(f"nothing is new; all of it is in {fetched.folder}")
        return
    count = len(fetched.files)
    files = "1 file" if count == 1 else f"{count} files"
    output.note(f"{files}, {output.size(fetched.bytes)}, in {fetched.folder}")
