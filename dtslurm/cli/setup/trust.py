"""``dtslurm trust``."""

from __future__ import annotations

from pathlib import Path

import click

from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output


@click.command()
@json_option
@click.argument("paths", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
def trust(as_json: bool, paths: tuple[Path, ...]) -> None:
    """Trust files of this project in their current state.

    A project's files can name hosts to log in to, secrets of yours, shell lines and script templates. dtslurm
    uses these files only after you have reviewed and trusted them, and again after each edit. Without FILE,
    all such files of the current project are trusted.
    """
    from dtslurm.services.request.trust import trust_files
    from dtslurm.services.wiring.context import Context

    trusted_files = trust_files(Context(), paths)
    if as_json:
        output.document(
            trusted=[
                {"path": str(file.path), "says": file.says, "known": file.known} for file in trusted_files
            ]
        )
        return
    for file in trusted_files:
        output.note(f"{'known' if file.known else 'trusted'}  {file.path}  ({file.says})")
    if not trusted_files:
        output.note("no file of this project needs trust")
