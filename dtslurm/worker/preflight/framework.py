"""Checks whether the framework can be imported on this node, and how long the import takes."""

import os
import re
import subprocess
import time
from typing import List

from .findings import BAD, OK, WARN, Finding, finding

SLOW_S = 30.0
LIMIT_S = 40.0


def framework(python: str, name: str, work_dir: str) -> List[Finding]:
    """Import a framework with the interpreter of the training code, in its working directory."""
    if not name or not python or not re.match(r"^\w+$", name):
        return []
    program = "import {0}; print({0}.__version__)".format(name)
    started_at = time.monotonic()
    try:
        completed = subprocess.run(
            [python, "-c", program],
            cwd=work_dir if os.path.isdir(work_dir) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # A shared file system may take longer while many nodes import at once.
        text = "{} was not imported within {:.0f} s".format(name, LIMIT_S)
        return [finding("framework", WARN, text)]
    except OSError as error:
        return [finding("framework", BAD, "cannot start {}: {}".format(python, error.strerror))]
    elapsed_s = time.monotonic() - started_at
    lines = [line for line in completed.stdout.decode("utf-8", "replace").splitlines() if line.strip()] or [
        ""
    ]
    if completed.returncode != 0:
        return [finding("framework", BAD, "the import of {} failed: {}".format(name, lines[-1]))]
    text = "{} {} imported in {:.1f} s".format(name, lines[-1], elapsed_s)
    return [finding("framework", WARN if elapsed_s > SLOW_S else OK, text)]
