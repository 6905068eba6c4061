"""What NVIDIA's own program says of the GPUs here, to hold dtslurm's words against."""

from __future__ import annotations

import shutil
import subprocess


def is_there() -> bool:
    """Tell whether there is such a program."""
    return shutil.which("nvidia-smi") is not None


def ask(*fields: str) -> list[dict[str, str]]:
    """Return these fields of each GPU, as text without units."""
    argv = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows]
