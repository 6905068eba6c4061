from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dtslurm.cli.commands.submit import render, submit
from dtslurm.cli.main import COMMANDS
from dtslurm.cli.options import SECTIONS
from tests.cli.conftest import Run


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_matches_the_commands(name: str, run: Run) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert name in run(name, "--help", code=0).stdout


@pytest.mark.parametrize("command", [submit, render])
def test_the_help_lists_every_option_once(command: click.Command) -> None:
    context = click.Context(command, info_name="x")
    said = command.get_help(context)
    options = [param for param in command.params if isinstance(param, click.Option)]
    matches = re.findall(r"^  (?:-\w, )?(--[\w-]+)", said, re.MULTILINE)
    assert sorted(matches) == sorted(
        ["--help", *(option.opts[-1] for option in options if not option.hidden)]
    )
    known = {item.name for item in [*submit.params, *render.params]}
    assert [name for names in SECTIONS.values() for name in names if name not in known] == []


def test_status_and_logs_rebuild_a_lost_index(run: Run, tmp_path: Path) -> None:
    job = run("submit", "--cluster", "local", "-t", "5", "--wait", "--parsable", "train.py", code=0)
    [index] = tmp_path.rglob("runs.sqlite")
    index.unlink()
    [result] = json.loads(run("status", "--json", code=0).stdout)["runs"]
    assert result["record"]["job_id"] == job.stdout.split()[0]
    index.unlink()
    assert run("logs", job.stdout.split()[0], code=0).stdout == "[0] hello\n"


def test_version(run: Run) -> None:
    assert run("--version", code=0).stdout.startswith("dtslurm ")


def test_a_closed_pipe_is_no_error(run: Run, folder: object) -> None:
    import os
    import subprocess
    import sys

    command = f"{sys.executable} -m dtslurm cluster schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=os.environ)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_deleted_current_directory_is_reported(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    for words in ("status", "render train.py", "plan llama-3-8b"):
        script = f"rmdir {gone}; {sys.executable} -m dtslurm {words}; code=$?; mkdir {gone}; exit $code"
        done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        result, hint = done.stderr.splitlines()
        assert result == "error: the current directory cannot be used: No such file or directory"
        assert hint.startswith("hint: ")


def test_commands_without_a_job_use_the_newest_run(run: Run, folder: Path) -> None:
    result = run("logs", code=3).stderr
    assert "this machine has no run yet" in result
    for word in ("older", "newer"):
        (folder / f"{word}.py").write_text(f"print('the {word} one')\n")
        run("submit", "--cluster", "local", "-l", "single", "--wait", "-t", "2", f"{word}.py", code=0)
    result = run("logs", code=0).stdout
    assert "the newer one" in result
    assert "the older one" not in result
    assert "newer" in run("diagnose", "--cluster", "local", code=0).stdout
    assert "no run on perlmutter" in run("diagnose", "--cluster", "perlmutter", code=3).stderr
    for words in (["status"], ["top", "--once"], ["diagnose"]):
        result = run(*words, "--cluster", "mars", code=2).stderr
        assert result.startswith("error: no cluster profile 'mars'\n"), words
