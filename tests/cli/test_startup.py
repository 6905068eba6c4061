"""What a command must not import: start-up time is felt at every call, most of all on shared homes."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "paramiko", "submitit", "textual", "jinja2", "pydantic"}


def modules_after(*words: str) -> set[str]:
    program = (
        "import sys; sys.argv = ['dtslurm', *sys.argv[1:]]\n"
        "from dtslurm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('\\nMODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("MODULES", 1)[1].split())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["status"]])
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    assert modules_after(*words) & HEAVY == set()


def test_help_imports_no_command() -> None:
    loaded = {name for name in modules_after("--help") if name.startswith("dtslurm.")}
    assert loaded <= {"dtslurm.cli", "dtslurm.cli.main", "dtslurm.errors"}


def test_render_imports_nothing_that_only_submitting_needs() -> None:
    assert modules_after("render", "--help") & {"torch", "paramiko", "submitit", "textual"} == set()


def test_a_plan_imports_only_what_it_needs() -> None:
    loaded = modules_after("plan", "gpt2", "--gpu", "A100", "--json")
    assert loaded & (HEAVY | {"numpy", "rich", "yaml", "dtslurm.services.context"}) == set()
