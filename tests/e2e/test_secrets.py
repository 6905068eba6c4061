"""A secret reaches the training code and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

CANARY = "c4n4ry'$(touch /tmp/x) \"`\\ \n-value"

PROGRAM = """
    import hashlib, os, time
    print("digest", hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest(), flush=True)
    time.sleep(2)
"""


def argvs() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def files_with_the_secret(folder: Path) -> list[str]:
    marks = (CANARY.encode(), b"c4n4ry")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.name for path in files if any(mark in path.read_bytes() for mark in marks))


@pytest.mark.parametrize("launcher", ["single", "srun", "torchrun"])
def test_c16_c17_c18_c34_secret_is_stored_in_a_single_file(cli: Cli, tmp_path: Path, launcher: str) -> None:
    import hashlib

    cli.env["WANDB_API_KEY"] = CANARY
    place = [] if launcher == "single" else ["--ntasks-per-node", "2"]
    job = cli.submit(
        "--secret", "WANDB_API_KEY", *place, "-l", launcher, "--python", sys.executable, cli.script(PROGRAM)
    )
    run = cli.run_dir(job)
    log = run.logs(0) / "rank-0.log"
    cli.wait_until(lambda: log.is_file() and "digest" in log.read_text())
    del cli.env["WANDB_API_KEY"]  # what still runs must have it from the file
    assert not [words for words in argvs() if b"c4n4ry" in words]
    if cli.cluster == "slurm":
        shown = subprocess.run(
            ["scontrol", "show", "job", "-dd", job],
            capture_output=True,
            env={**os.environ, **cli.env},
            check=True,
        )
        assert b"c4n4ry" not in shown.stdout
    cli.wait_for_end(job)
    assert hashlib.sha256(CANARY.encode()).hexdigest() in log.read_text()
    assert files_with_the_secret(run.path) == []  # it starts once, and has read them
    assert files_with_the_secret(tmp_path / "state") == []
    stdout = cli("status", "--json", job).stdout + cli("logs", job).stdout
    assert "c4n4ry" not in stdout


def test_invalid_secret_is_reported_without_its_value(cli: Cli) -> None:
    done = cli(
        *("submit", "--cluster", cli.cluster, "-t", "5", "--secret", "KEY=c4n4ry", "--secret", "NO_SUCH_KEY"),
        *("--secret", "1x", cli.script("pass")),
        code=2,
    )
    assert "c4n4ry" not in done.stderr
    assert "--secret accepts only a name" in done.stderr
    assert (
        "--secret NO_SUCH_KEY: neither your environment nor the keyring has a value of this name"
        in done.stderr
    )
    assert "'1x' is not a variable name" in done.stderr


def test_secret_option_is_suggested_for_a_variable_that_looks_secret(cli: Cli) -> None:
    done = cli(
        *("submit", "--cluster", cli.cluster, "-t", "5", "--dry-run", "--env", "HF_TOKEN=abc"),
        cli.script("pass"),
    )
    assert "--secret HF_TOKEN" in done.stderr


def test_rendered_script_requires_its_secrets_from_the_environment(cli: Cli) -> None:
    words = ("--secret", "WANDB_API_KEY", "--secret", "HF_TOKEN")
    done = cli("render", "--cluster", "local", "-t", "5", *words, cli.script("pass"))
    way = "submit with: sbatch --export=WANDB_API_KEY,HF_TOKEN"
    assert f': "${{WANDB_API_KEY:?export this variable, then {way}}}"' in done.stdout
    assert f': "${{HF_TOKEN:?export this variable, then {way}}}"' in done.stdout
    assert (
        "secrets are not in the script: export these variables, and submit with sbatch --export="
        in done.stderr
    )
    assert os.environ.get("WANDB_API_KEY", "c4n4ry") not in done.stdout
