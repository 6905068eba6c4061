"""Libraries that change what a process sees, as LD_PRELOAD: its clock, its file server."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

from tests.conftest import skip_or_fail

SOURCES = Path(__file__).parent


def skew_clock(seconds: float, folder: Path) -> dict[str, str]:
    """Return the environment of processes whose clock is ahead by so many seconds; the library goes there."""
    return {"LD_PRELOAD": str(build("skewed_clock", folder)), "CLOCK_SKEW": f"{seconds:g}"}


def trouble_disk(below: Path, switch: Path, folder: Path) -> dict[str, str]:
    """Return the environment of processes for which all below a path fails or is slow while a file is there.

    The first letter in that file says how; see ``unsteady_disk.c``.
    """
    library = str(build("unsteady_disk", folder))
    return {"LD_PRELOAD": library, "UNSTEADY_FOLDER": f"{below}/", "UNSTEADY_SWITCH": str(switch)}


def build(name: str, folder: Path) -> Path:
    """Compile a library of this folder into another one, unless it is there; several threads may ask."""
    library = folder / f"{name}.so"
    if not library.exists():
        if shutil.which("gcc") is None:
            skip_or_fail("gcc", "apt-get install gcc")
        source, draft = SOURCES / f"{name}.c", folder / f"{name}.{threading.get_ident()}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", draft, source, "-ldl"], check=True)
        draft.replace(library)
    return library
