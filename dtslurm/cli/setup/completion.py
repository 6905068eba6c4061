"""``dtslurm completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the SHELL completion of commands, options, clusters and runs.

    \b
    bash  dtslurm completion bash > ~/.local/share/bash-completion/completions/dtslurm
    zsh   dtslurm completion zsh > FOLDER/_dtslurm, where FOLDER is in your $fpath
    fish  dtslurm completion fish > ~/.config/fish/completions/dtslurm.fish
    """
    from dtslurm.cli.main import cli

    completion_class = get_completion_class(shell)
    assert completion_class is not None  # noqa: S101 - click supports all three shells
    click.echo(completion_class(cli, {}, "dtslurm", "_DTSLURM_COMPLETE").source())
