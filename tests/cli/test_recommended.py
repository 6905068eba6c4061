"""Every command that a message recommends exists and accepts the arguments of the message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import dtslurm
from dtslurm.cli.main import COMMANDS
from dtslurm.cli.main import cli as program
from dtslurm.config import signatures
from dtslurm.model.runs.state import JobState
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs, ended_job, rank_record

PACKAGE = Path(dtslurm.__file__).parent
NAMED = re.compile(r"\bdtslurm ([a-z][^;,()'\"`\n\[\]]*)")
JOB, SCRIPT, HOST = "17", "train.py", "login.example.org"
PROSE = {"would", "file", "profile", "job"}
# What needs a terminal, another machine, or a sweep; each has tests of its own.
NOT_RUN = {
    ("top",),
    ("cluster", "discover"),
    ("sweep", "stop"),
    ("sweep", "resume"),
    ("cluster", "check"),
    ("doctor",),
}


def string_literals(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of a module except docstrings; replacement fields become ``{x}``."""
    nodes = list(ast.walk(tree))
    held = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    held |= {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        if id(node) in held:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(value.value) if isinstance(value, ast.Constant) else "{x}" for value in node.values
            )


@cache
def recommended_commands() -> list[str]:
    """Return the text after ``dtslurm`` in each message, up to the end of the clause."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "examples.py"]  # test_help.py runs those
    programs = [path.read_text() for path in paths]
    texts = [
        text
        for program in programs
        if "dtslurm " in program  # a syntax tree of every module takes seconds
        for text in string_literals(ast.parse(program))
    ]
    for item in signatures.load(PACKAGE, {}):
        texts += [item.summary, item.advice]
    result = {match[1].strip() for text in texts for match in NAMED.finditer(text)}
    return sorted(item for item in result if not is_prose(item) and item != "cluster profile")


def is_prose(sentence: str) -> bool:
    """Tell whether dtslurm is the subject of a sentence, as in "dtslurm reads it"."""
    word = sentence.split(maxsplit=1)[0]
    return word not in COMMANDS and (word in PROSE or word.endswith("s"))


def parse_command(sentence: str) -> tuple[click.Command | None, tuple[str, ...], list[str]]:
    """Return the command that a sentence begins with, its name, and the words that belong to it."""
    words = [word.rstrip(".") for word in sentence.replace("{x}", " {x}").split()]
    command: click.Command | None = program
    name: list[str] = []
    while isinstance(command, click.Group) and len(name) < len(words):
        command = command.get_command(click.Context(command), words[len(name)])
        name.append(words[len(name)])
    given: list[str] = []
    value = False
    for word in words[len(name) :]:
        if value:
            value = False
        elif word.startswith("-"):
            value = command is not None and option_takes_value(command, word)
        elif "{" not in word and word not in {"JOB", "SCRIPT"}:
            break
        given.append(word)
    return command, tuple(name), given


def option_takes_value(command: click.Command, option: str) -> bool:
    param = next((param for param in command.params if option.split("=", maxsplit=1)[0] in param.opts), None)
    return isinstance(param, click.Option) and not (param.is_flag or param.count or "=" in option)


def fill_arguments(name: tuple[str, ...], given: list[str]) -> list[str]:
    script = name == ("submit",)
    replaced = {"JOB": JOB, "SCRIPT": SCRIPT}
    words = [re.sub(r"\{x\}", SCRIPT if script else JOB, replaced.get(word, word)) for word in given]
    needs_one = not any(not word.startswith("-") for word in words)
    if needs_one and name[-1] in {"submit", "render"}:
        words.append(SCRIPT)
    elif needs_one and name[-1] in {"logs", "diagnose", "cancel", "release", "hold", "requeue", "resubmit"}:
        words.append(JOB)
    elif name in {("artifacts", "show"), ("artifacts", "unpin")}:
        words += [JOB, "step-1"]
    elif needs_one and name[0] in {"sweep", "artifacts"}:
        words.append(JOB)
    return [*name, *words, *(["--dry-run"] if name == ("submit",) and "--dry-run" not in words else [])]


def test_recommended_commands_are_extracted_from_the_messages() -> None:
    assert len(recommended_commands()) > 50
    assert {"cancel JOB", "release JOB"} <= {item for item in recommended_commands() if len(item) < 12}


@pytest.mark.parametrize("sentence", recommended_commands())
def test_a_recommended_command_exists(sentence: str) -> None:
    command, name, given = parse_command(sentence)
    assert command is not None, f"there is no command {' '.join(name)}"
    params = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    unknown = [word for word in given if word.startswith("-") and word.split("=")[0] not in params]
    assert not unknown, f"dtslurm {' '.join(name)} has no option {unknown[0]}"


@pytest.mark.parametrize(
    "words",
    sorted(
        {
            tuple(fill_arguments(name, given))
            for _, name, given in map(parse_command, recommended_commands())
            if name not in NOT_RUN and "--live" not in given
        }
    ),
    ids=" ".join,
)
def test_a_recommended_command_runs(words: tuple[str, ...], invoke: Run, runs: Runs) -> None:
    failed = ended_job(JOB, JobState.FAILED)
    runs.add(
        "train", JOB, failed, files={"ranks/0/0.json": rank_record(0, "n1", 1), "logs/0/rank-0.log": "no\n"}
    )
    result = invoke(*words)
    assert "Usage:" not in result.stderr, result.stderr  # that this run has ended is no fault of the message
