"""An option's old name: taken, warned of, never both."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from dtslurm.cli.retired import retired_option


@click.command()
@click.option("--spare-nodes", type=click.IntRange(min=0), default=0)
@click.option("--env", multiple=True)
@click.option("--watch/--no-watch", default=None)
@retired_option("--spares", instead="--spare-nodes", until="0.4")
@retired_option("--var", instead="--env", until="0.4", multiple=True)
@retired_option("--no-look", instead="--no-watch", until="0.4", is_flag=True, flag_value=False, default=None)
@click.argument("words", nargs=-1)
def command(**values: Any) -> None:
    click.echo(repr(dict(sorted(values.items()))))


def ran(*words: str) -> Any:
    return CliRunner().invoke(command, words)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--spares", "3"], ["--spare-nodes", "3"]),
        (["--spares=3", "train.py"], ["--spare-nodes=3", "train.py"]),
        (["--var", "A=1", "--var", "B=2"], ["--env", "A=1", "--env", "B=2"]),
        (["--no-look"], ["--no-watch"]),
    ],
)
def test_an_old_name_does_what_the_new_one_does_and_warns(old: list[str], new: list[str]) -> None:
    asked, wanted = ran(*old), ran(*new)
    assert asked.exit_code == wanted.exit_code == 0
    assert asked.stdout == wanted.stdout
    assert wanted.stderr == ""
    name, instead = old[0].partition("=")[0], new[0].partition("=")[0]
    assert asked.stderr == f"Warning: {name} is now {instead}; the old name will be removed in 0.4.\n"


def test_a_value_is_checked_as_the_new_option_checks_it() -> None:
    done = ran("--spares", "-1")
    assert done.exit_code == 2
    assert "'--spare-nodes'" in done.stderr


def test_both_names_at_once_are_a_mistake() -> None:
    for words in (["--spares", "1", "--spare-nodes", "2"], ["--spare-nodes", "2", "--spares", "1"]):
        done = ran(*words)
        assert done.exit_code == 2
        assert "--spares is the old name of --spare-nodes" in done.stderr


def test_help_shows_the_new_name_alone() -> None:
    shown = ran("--help").stdout
    assert "--spare-nodes" in shown
    assert "--spares" not in shown


def test_what_follows_two_dashes_is_not_ours() -> None:
    done = ran("--", "--spares", "3")
    assert done.stderr == ""
    assert "'words': ('--spares', '3')" in done.stdout
