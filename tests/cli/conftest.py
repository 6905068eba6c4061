"""The fixtures of the command line tests: a project folder, and no cluster except ``local``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtslurm.cli.main import main
from tests.cli.sample_runs import Runs
from tests.cli.slurm_programs import Programs
from tests.discover.answers import PARTITIONS
from tests.slurm import recorded
from tests.warm import run_dtslurm

Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    return project


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Run:
    """Run ``dtslurm`` in the folder; the second form of environment wins."""

    def call(*words: str, code: int | None = None, prefix: tuple[str, ...] = (), **extra: str) -> Finished:
        env = {**os.environ, "DTSLURM_LOCAL_STATE": str(tmp_path / "local"), "PATH": "/usr/bin:/bin", **extra}
        done = run_dtslurm(words, cwd=folder, env=env, timeout=600, prefix=prefix)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


@pytest.fixture
def invoke(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run ``dtslurm`` in this process, which saves a tenth of a second and more; else as ``run`` does."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def call(*words: str, code: int | None = None) -> Finished:
        monkeypatch.setattr(sys, "argv", ["dtslurm", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        done = Finished(list(words), int(ended.value.code or 0), said.out, said.err)
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.fixture
def slurm(invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Slurm programs with recorded answers about nodes; sbatch refuses every job."""
    del invoke  # which sets a PATH without it
    programs = Programs(tmp_path / "programs")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    programs.say("scontrol show config", recorded.read("24.11.5", "config.txt"))
    programs.say("scontrol -o show partition", PARTITIONS)
    programs.say("scontrol -o show node", recorded.read("24.11.5", "nodes.txt"))
    programs.say("sbatch --version", "slurm 24.11.5\n")
    return programs
