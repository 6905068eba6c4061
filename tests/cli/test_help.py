"""The help of every command: examples that can be run, and no names of Python's types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from dtslurm.cli.examples import EXAMPLES
from dtslurm.cli.main import cli


def iterate_commands(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command, str]]:
    """Yield each command below, with its path and its help."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        inner = click.Context(below, info_name=name, parent=context, terminal_width=100)
        yield inner.command_path.removeprefix("dtslurm "), below, below.get_help(inner)
        yield from iterate_commands(below, inner)


COMMANDS = {
    path: (command, text)
    for path, command, text in iterate_commands(cli, click.Context(cli, info_name="dtslurm"))
}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_examples_in_its_help(path: str) -> None:
    command, text = COMMANDS[path]
    if not isinstance(command, click.Group):
        assert "Examples:" in text
        assert f"  dtslurm {path}" in text.partition("Examples:")[2]


def test_every_example_belongs_to_an_existing_command() -> None:
    assert EXAMPLES.keys() <= COMMANDS.keys()


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_can_be_parsed(line: str) -> None:
    words = shlex.split(re.split(r" [|>] ", line)[0])
    assert words.pop(0) == "dtslurm"
    context = click.Context(cli, info_name="dtslurm")
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        result = command.get_command(context, words.pop(0))
        assert result is not None
        command = result
    assert command.make_context("dtslurm", words, parent=context).params is not None


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_shows_no_type_names(path: str) -> None:
    assert not re.search(
        r"\b(TEXT|INTEGER|FLOAT|RANGE|PATH|FILENAME|DIRECTORY|BOOLEAN|UUID)\b", option_column(path)
    )


def option_column(path: str) -> str:
    """Return the left column of a command's options."""
    return "\n".join(re.findall(r"^  (-[^ ].*?)(?:  .*)?$", COMMANDS[path][1], re.MULTILINE))
