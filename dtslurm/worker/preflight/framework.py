"""Whether the framework can be imported here, and how long that takes."""

import os
import re
import subprocess
import time
from typing import List

from .findings import BAD, OK, WARN, Finding, finding

SLOW_S = 30.0
LIMIT_S = 40.0


def framework(python: str, name: str, work_dir: str) -> List[Finding]:
    """Import a framework by the interpreter of the training code, in the folder it runs in."""
    if not name or not python or not re.match(r"^\w+$", name):
        return []
    program = "import {0}; print({0}.__version__)".format(name)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [python, "-c", program],
            cwd=work_dir if os.path.isdir(work_dir) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # A shared file system under the imports of many nodes may well take longer.
        text = "import of {} was not done after {:.0f} s".format(name, LIMIT_S)
        return [finding("framework", WARN, text)]
    except OSError as error:
        return [finding("framework", BAD, "cannot start {}: {}".format(python, error.strerror))]
    took = time.monotonic() - begin
    words = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()] or [""]
    if done.returncode != 0:
        return [finding("framework", BAD, "import of {} fails: {}".format(name, words[-1]))]
    text = "{} {} imported in {:.1f} s".format(name, words[-1], took)
    return [finding("framework", WARN if took > SLOW_S else OK, text)]
