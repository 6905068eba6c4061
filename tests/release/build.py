"""Builds a release: an sdist of the checkout, and a wheel of that sdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def uv() -> Path:
    """Return the uv that is installed with the tests."""
    from uv import find_uv_bin

    return Path(find_uv_bin())


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist, and the wheel made from it alone."""
    quietly([uv(), "build", "--quiet", "--python", sys.executable, "--out-dir", folder, ROOT])
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def environment(folder: Path, python: Path | str, *what: Path | str) -> Path:
    """Make an environment without pip that has WHAT and what it depends on; return its programs' folder."""
    quietly([uv(), "venv", "--quiet", "--python", python, folder])
    quietly([uv(), "pip", "install", "--quiet", "--python", folder / "bin" / "python", *what])
    return folder / "bin"


def quietly(argv: list[Path | str], **more: object) -> str:
    """Run a command and return its output; say all that it said where it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    if done.returncode:
        words = " ".join(str(word) for word in argv)
        raise RuntimeError(f"exit code {done.returncode}: {words}\n{done.stdout}{done.stderr}")
    return str(done.stdout)
