"""Virtual environments of the frameworks that tests train with: built once, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.garbage import collect_rarely
from tests.release.build import uv

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtslurm" / "frameworks"
PATIENCE = 1200


def environment(name: str, requirements: Sequence[str], env: Mapping[str, str] | None = None) -> Path:
    """Return the Python of an environment that holds ``requirements``, building it if need be.

    The folder's name holds a hash of all that is asked, so a changed list is a new environment. A lock
    file makes parallel callers wait for the one who builds; a half-built folder is built anew.

    Args:
        env: variables for the installation, such as ``DS_BUILD_OPS=0``.
    """
    asked = json.dumps([sys.version_info[:2], sorted(requirements), sorted((env or {}).items())])
    folder = CACHE / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:10]}"
    python, complete = folder / "bin" / "python", folder / ".complete"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], {})
            _install(python, requirements, env or {})
            complete.touch()
        collect_rarely(folder)
    return python


def _install(python: Path, requirements: Sequence[str], env: Mapping[str, str]) -> None:
    """Install by uv: its environments share the files of a package, and it takes a fifth of pip's time."""
    argv = [str(uv()), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
    if links := os.environ.get("PIP_FIND_LINKS"):  # uv has a name of its own for it
        argv += ["--find-links", links]
    _run([*argv, *requirements], {"UV_HTTP_TIMEOUT": "180", **env})


def _run(argv: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(
        argv,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-4000:]}", pytrace=False)
