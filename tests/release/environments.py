"""Installs a release in every way and with every Python that is to be had here, and tries it out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.release.build import build, environment, quietly, uv
from tests.release.trial import try_out

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PIPX = "pipx==1.18.4"
# name, and how to install (release, empty folder) -> the program
Way = tuple[str, Callable[[Path, Path], Path]]


def find_interpreter(version: str) -> Path | None:
    """Return an interpreter of that version: on PATH, uv's, or pyenv's."""
    if program := shutil.which(f"python{version}"):
        try:  # pyenv's stand-ins are there for versions that are not chosen, too
            return Path(quietly([program, "-c", "import sys; print(sys.executable)"]).strip())
        except RuntimeError:
            pass
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for folder in sorted(pyenv.glob(f"versions/{version}*/bin/python{version}")):
        return folder
    try:
        return Path(quietly([uv(), "python", "find", "--no-python-downloads", version]).strip())
    except RuntimeError:
        return None


def with_uv_tool(release: Path, folder: Path) -> Path:
    """Install as `uv tool install` does, in a folder instead of the user's home."""
    env = {**os.environ, "UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    quietly([uv(), "tool", "install", "--quiet", "--python", sys.executable, release], env=env)
    return folder / "bin" / "dtslurm"


def with_pipx(release: Path, folder: Path) -> Path:
    """Install as `pipx install` does, in a folder instead of the user's home."""
    pipx = environment(folder / "pipx", sys.executable, PIPX) / "pipx"
    env = {**os.environ, "PIPX_HOME": str(folder / "home"), "PIPX_BIN_DIR": str(folder / "bin")}
    quietly([pipx, "install", "--python", sys.executable, release], env=env)
    return folder / "bin" / "dtslurm"


def ways() -> Iterator[Way]:
    """Yield every way to install that can be tried on this machine; say which cannot."""
    for version in PYTHONS:
        python = find_interpreter(version)
        if python is None:
            print(f"{f'Python {version}':<24}not tried: there is none on this machine")
            continue

        def install(release: Path, folder: Path, python: Path = python) -> Path:
            return environment(folder / "env", python, release) / "dtslurm"

        yield f"Python {version}", install
    yield "uv tool install", with_uv_tool
    yield "pipx install", with_pipx


def test_release(folder: Path) -> int:
    """Build and try all ways; print one line each and return how many failed."""
    sdist, wheel = build(folder / "dist")
    failed = 0
    for number, (name, install) in enumerate(ways()):
        for kind, release in (("wheel", wheel), ("sdist", sdist)):
            place = folder / f"{number}-{kind}"
            try:
                try_out(install(release, place), place / "user")
                said = "works"
            except (AssertionError, RuntimeError) as error:
                said, failed = f"FAILED: {error}", failed + 1
            print(f"{name:<18}{kind:<6}{said}", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    return failed
