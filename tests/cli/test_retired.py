"""Old option names: accepted with a warning, refused beside the new name."""

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
@retired_option("--spares", new_name="--spare-nodes", removal_version="0.4")
@retired_option("--var", new_name="--env", removal_version="0.4", multiple=True)
@retired_option(
    "--no-look", new_name="--no-watch", removal_version="0.4", is_flag=True, flag_value=False, default=None
)
@click.argument("words", nargs=-1)
def sample_command(**values: Any) -> None:
    click.echo(repr(dict(sorted(values.items()))))


def invoke_sample(*words: str) -> Any:
    return CliRunner().invoke(sample_command, words)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--spares", "3"], ["--spare-nodes", "3"]),
        (["--spares=3", "train.py"], ["--spare-nodes=3", "train.py"]),
        (["--var", "A=1", "--var", "B=2"], ["--env", "A=1", "--env", "B=2"]),
        (["--no-look"], ["--no-watch"]),
    ],
)
def test_an_old_option_name_acts_like_the_new_name_and_warns(old: list[str], new: list[str]) -> None:
    asked, wanted = invoke_sample(*old), invoke_sample(*new)
    assert asked.exit_code == wanted.exit_code == 0
    assert asked.stdout == wanted.stdout
    assert wanted.stderr == ""
    name, instead = old[0].partition("=")[0], new[0].partition("=")[0]
    assert asked.stderr == f"Warning: {name} is now {instead}; the old name will be removed in 0.4.\n"


def test_the_value_of_an_old_option_is_validated_like_the_new_option() -> None:
    done = invoke_sample("--spares", "-1")
    assert done.exit_code == 2
    assert "'--spare-nodes'" in done.stderr


def test_the_old_and_the_new_option_name_together_are_refused() -> None:
    for words in (["--spares", "1", "--spare-nodes", "2"], ["--spare-nodes", "2", "--spares", "1"]):
        done = invoke_sample(*words)
        assert done.exit_code == 2
        assert "--spares is the old name of --spare-nodes" in done.stderr


def test_the_help_shows_only_the_new_option_name() -> None:
    shown = invoke_sample("--help").stdout
    assert "--spare-nodes" in shown
    assert "--spares" not in shown


def test_an_old_option_name_after_two_dashes_is_an_argument() -> None:
    done = invoke_sample("--", "--spares", "3")
    assert done.stderr == ""
    assert "'words': ('--spares', '3')" in done.stdout
