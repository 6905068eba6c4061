"""Builds a release: an sdist of the checkout, and a wheel of that sdist.

``python -m tests.release.build FOLDER`` prints the checksums of both in the format of ``sha256sum``. The same
commit gives the same bytes: the build tools come from ``requirements-release.lock``, times from the commit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-release.lock"


def uv() -> Path:
    """Return the uv that is installed with the tests."""
    from uv import find_uv_bin

    return Path(find_uv_bin())


def build(folder: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """Return the sdist of a source tree, and the wheel made from it alone."""
    options: list[Path | str] = ["--build-constraints", LOCK, "--require-build-hashes", "--no-build-logs"]
    argv = [uv(), "build", "--quiet", "--python", sys.executable, *options, "--out-dir", folder, source]
    quietly(argv, env={**os.environ, "SOURCE_DATE_EPOCH": commit_time()})
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def commit_time() -> str:
    """Return the time of the checkout's commit in seconds since 1970."""
    return quietly(["git", "-C", ROOT, "log", "-1", "--format=%ct"]).strip()


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


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
