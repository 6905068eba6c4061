"""``dtslurm fetch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dtslurm.cli import output
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.logs.clean import safe
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
    with _progress() as progress:
        fetched = bring(context, record, patterns, folder, progress)
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


@contextmanager
def _progress() -> Iterator[Callable[[Path, int, int], None]]:
    """Show the file on its way, on a terminal."""
    if not output.is_terminal():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bars:
        bar = bars.add_task("", total=None)

        def show(path: Path, done: int, size: int) -> None:
            bars.update(bar, description=safe(path.name), completed=done, total=size)

        yield show
