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
    """Trust files of this project as they are now.

    A project's files can name hosts that you would log in to, secrets of yours, shell lines and templates of
    scripts. They count once you have looked through them and trusted them, and again after each edit. Without
    a FILE all those of the project here are trusted.
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
        output.note("nothing here asks for trust")
