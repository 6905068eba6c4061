"""``dtslurm manual``: the man page, made from the command tree."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

import dtslurm


@click.command()
def manual() -> None:
    """Print the manual page, for `man -l -` or a folder of man pages."""
    from dtslurm.cli.main import cli

    click.echo(page(cli))


def page(command: click.Command) -> str:
    """Return a command and all below it as a page in man's macros (groff_man(7))."""
    context = click.Context(command, info_name="dtslurm")
    head = [
        f'.TH DTSLURM 1 "" "dtslurm {dtslurm.__version__}" "User Commands"',
        ".SH NAME",
        "dtslurm \\- training scripts on Slurm clusters",
        ".SH SYNOPSIS",
        ".B dtslurm",
        "COMMAND [OPTIONS] [ARGS]...",
        ".SH DESCRIPTION",
        *_paragraphs(command.help),
        ".SH COMMANDS",
    ]
    tail = [".SH EXIT STATUS", *(_text(line) for line in _EXIT.splitlines())]
    return "\n".join([*head, *_below(command, context), *tail])


_EXIT = """\
0 done; 2 the request is wrong; 3 Slurm refused or its answer is unknown; 4 a command or the link failed;
5 the disk refused. submit --wait and submit --follow end with the job's own code."""


def _below(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a section of each command below, in the order of everyday use."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if below is None or below.hidden:
            continue
        inner = click.Context(below, info_name=name, parent=context)
        usage = " ".join([inner.command_path, *below.collect_usage_pieces(inner)])
        yield f".SS {_text(usage)}"
        yield from _paragraphs(below.help)
        for parameter in below.params:
            if record := parameter.get_help_record(inner):
                yield from (".TP", f".B {_text(record[0])}", _text(record[1] or "As sbatch's."))
        yield from _paragraphs(below.epilog)
        yield from _below(below, inner)


def _paragraphs(text: str | None) -> Iterator[str]:
    for number, part in enumerate(inspect.cleandoc(text or "").split("\n\n")):
        as_it_is = part.startswith("\b\n")
        if as_it_is or number:  # a section's first paragraph begins by itself
            yield ".nf" if as_it_is else ".PP"
        yield from (_text(line) for line in part.replace("\b\n", "").splitlines())
        if as_it_is:
            yield ".fi"


def _text(line: str) -> str:
    """Return a line in which nothing is a request or an escape of groff."""
    quoted = line.replace("\\", "\\e").replace("-", "\\-")
    quoted = "".join(one if one.isascii() else f"\\[u{ord(one):04X}]" for one in quoted)
    return f"\\&{quoted}" if quoted.startswith((".", "'")) else quoted
