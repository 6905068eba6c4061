"""The tools that dtslurm is compared with, each in a separate environment with the versions of NAME.txt.

`uv pip compile --universal --python-version 3.10` generates these files. leptonai, which nemo-run needs, is
pinned below 0.40, because nemo-run does not start with later versions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# dtslurm is installed from this checkout, as users install it
NAMES = ("dtslurm", "simple-slurm", "submitit", "clusterscope", "torchx", "nemo-run")


class PeerMissing(Exception):
    """A peer could not be installed."""


@cache
def environment(name: str) -> Path:
    """Return the folder of a tool's environment, which is created again if its versions have changed.

    Raises:
        PeerMissing: The tool cannot be installed. The message is the last line of the installer's output.
    """
    folder = ROOT / ".cache" / "peers" / name
    pins = "" if name == "dtslurm" else (Path(__file__).parent / f"{name}.txt").read_text()
    installed_pins = folder / "pins.txt"
    if name != "dtslurm" and installed_pins.exists() and installed_pins.read_text() == pins:
        return folder
    from uv import find_uv_bin

    uv = find_uv_bin()
    packages: Sequence[str] = (
        [str(ROOT)] if name == "dtslurm" else ["-r", str(Path(__file__).parent / f"{name}.txt")]
    )
    _run_installer([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
    # Bytecode is compiled, as by pip, so that the first start of a tool is not slower.
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--link-mode", "copy"]
    _run_installer([*install, "--python", str(folder / "bin" / "python"), *packages])
    installed_pins.write_text(pins)
    return folder


def _run_installer(argv: Sequence[str]) -> None:
    process = subprocess.run(argv, capture_output=True, text=True, check=False)
    if process.returncode:
        raise PeerMissing((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])


def version(name: str) -> str:
    """Return the pinned version of a tool."""
    if name == "dtslurm":
        import dtslurm

        return dtslurm.__version__
    for line in (Path(__file__).parent / f"{name}.txt").read_text().splitlines():
        package, _, rest = line.partition("==")
        if package.replace("_", "-") == name:
            return rest.partition(" ")[0]
    raise PeerMissing(f"{name}.txt does not contain a version of {name}")
