"""The tools that dtslurm is measured beside, each in an environment of its own, pinned in NAME.txt.

`uv pip compile --universal --python-version 3.10` makes such a file. Of nemo-run, leptonai is held below
0.40: it does not start with what pip takes by itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# dtslurm itself is installed from this checkout, as a user would have it
NAMES = ("dtslurm", "simple-slurm", "submitit", "clusterscope", "torchx", "nemo-run")


class PeerMissing(Exception):
    """A peer could not be installed."""


@cache
def environment(name: str) -> Path:
    """Return the folder of a peer's environment, made on first use and again when its pins changed.

    Raises:
        PeerMissing: it does not install; the message is the installer's last line.
    """
    folder = ROOT / ".cache" / "peers" / name
    pins = "" if name == "dtslurm" else (Path(__file__).parent / f"{name}.txt").read_text()
    known = folder / "pins.txt"
    if name != "dtslurm" and known.exists() and known.read_text() == pins:
        return folder
    from uv import find_uv_bin

    uv = find_uv_bin()
    what: Sequence[str] = (
        [str(ROOT)] if name == "dtslurm" else ["-r", str(Path(__file__).parent / f"{name}.txt")]
    )
    _installing([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
    # Compiled as pip does, so that no peer pays for it in its first start.
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--link-mode", "copy"]
    _installing([*install, "--python", str(folder / "bin" / "python"), *what])
    known.write_text(pins)
    return folder


def _installing(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerMissing((done.stderr.strip().splitlines() or ["exit code"])[-1])


def version(name: str) -> str:
    """Return the version that is pinned."""
    if name == "dtslurm":
        import dtslurm

        return dtslurm.__version__
    for line in (Path(__file__).parent / f"{name}.txt").read_text().splitlines():
        package, _, rest = line.partition("==")
        if package.replace("_", "-") == name:
            return rest.partition(" ")[0]
    raise PeerMissing(f"{name}.txt does not pin it")
