"""``python -m tests.train.versions [RELEASE]...``: the tests of dtslurm.train with other torch releases."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.frameworks.envs import environment

ROOT = Path(__file__).parents[2]
RELEASES = ("2.4.1", "2.8.0", "2.11.0")  # the oldest that is supported, and two on the way to the suite's own
TESTING = ("numpy", "psutil", "pytest", "pytest-rerunfailures", "pytest-timeout", "pytest-xdist", "pyyaml")
DTSLURMS_OWN = ("click", "ClusterShell", "jinja2", "paramiko", "pathspec", "pydantic-core", "rich", "textual")


def passes(release: str) -> bool:
    """Run the tests with a release of torch, in an environment that is built for it; tell whether they pass.

    Warnings of older releases are torch's own and count for nothing.
    """
    python = environment(f"torch-{release}", (f"torch=={release}", *TESTING, *DTSLURMS_OWN, "hypothesis"))
    argv = [str(python), "-m", "pytest", "-q", "-o", "filterwarnings=ignore", "tests/train"]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode == 0


def main() -> None:
    """Try each release and end with 1 if tests failed with one."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("release", nargs="*", default=RELEASES)
    failed = [release for release in parser.parse_args().release if not passes(release)]
    sys.exit(f"tests failed with torch {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
