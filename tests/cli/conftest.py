"""The command line in a folder of its own, without any cluster but ``local``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "dtslurm", *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call
