"""``python -m tests.garbage``: let the programs of this environment look for garbage more rarely.

Importing torch creates a million objects. Python looks through them again and again meanwhile, and once more
at its end: a third of the CPU time of a process that only starts, and half, if it makes an optimizer. A file
of ``site-packages`` changes this for all programs of an environment in which tests train.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

_FILE = "dtslurm_tests.pth"
_LINE = "import atexit, gc; gc.set_threshold(50_000, 20, 20); atexit.register(gc.freeze)\n"


def collect_rarely(environment: Path) -> None:
    """Change a virtual environment with the Python version of this process."""
    paths = {name: str(environment) for name in ("base", "platbase")}
    (Path(sysconfig.get_path("purelib", vars=paths)) / _FILE).write_text(_LINE)


if __name__ == "__main__":
    collect_rarely(Path(sys.prefix))
