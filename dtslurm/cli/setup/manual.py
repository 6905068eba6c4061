"""``dtslurm manual``: the man page, generated from the command tree."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

import dtslurm


@click.command()
def manual() -> None:
    """Print the manual page, for `man -l -` or a folder of man pages."""
    from dtslurm.cli.main import cli

    click.echo(render_manual(cli))


def render_manual(command: click.Command) -> str:
    """Return a command and its subcommands as a man page in groff_man(7) macros."""
    context = click.Context(command, info_name="dtslurm")
    head = [
        f'.TH DTSLURM 1 "" "dtslurm {dtslurm.__version__}" "User Commands"',
        ".SH NAME",
        "dtslurm \\- training scripts on Slurm clusters",
        ".SH SYNOPSIS",
        ".B dtslurm",
        "COMMAND [OPTIONS] [ARGS]...",
        ".SH DESCRIPTION",
        *_iterate_paragraphs(command.help),
        ".SH COMMANDS",
    ]
    tail = [".SH EXIT STATUS", *(_escape_groff(line) for line in _EXIT.splitlines())]
    return "\n".join([*head, *_iterate_sections(command, context), *tail])


_EXIT = """\
0 success; 2 invalid request; 3 Slurm refused the request or its answer is unknown; 4 a command or the
connection failed; 5 a file could not be written. submit --wait and submit --follow end with the
job's own code."""


def _iterate_sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a section for each subcommand, in the order of everyday use."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        subcommand = command.get_command(context, name)
        if subcommand is None or subcommand.hidden:
            continue
        subcontext = click.Context(subcommand, info_name=name, parent=context)
        usage = " ".join([subcontext.command_path, *subcommand.collect_usage_pieces(subcontext)])
        yield f".SS {_escape_groff(usage)}"
        yield from _iterate_paragraphs(subcommand.help)
        for parameter in subcommand.params:
            if record := parameter.get_help_record(subcontext):
                yield from (
                    ".TP",
                    f".B {_escape_groff(record[0])}",
                    _escape_groff(record[1] or "Same as the option of sbatch."),
                )
        yield from _iterate_paragraphs(subcommand.epilog)
        yield from _iterate_sections(subcommand, subcontext)


def _iterate_paragraphs(text: str | None) -> Iterator[str]:
    for number, paragraph in enumerate(inspect.cleandoc(text or "").split("\n\n")):
        is_preformatted = paragraph.startswith("\b\n")
        if is_preformatted or number:  # a section's first paragraph needs no macro
            yield ".nf" if is_preformatted else ".PP"
        yield from (_escape_groff(line) for line in paragraph.replace("\b\n", "").splitlines())
        if is_preformatted:
            yield ".fi"


def _escape_groff(line: str) -> str:
    """Escape a line so that groff sees no requests and escapes in it."""
    quoted = line.replace("\\", "\\e").replace("-", "\\-")
    quoted = "".join(
        character if character.isascii() else f"\\[u{ord(character):04X}]" for character in quoted
    )
    return f"\\&{quoted}" if quoted.startswith((".", "'")) else quoted
