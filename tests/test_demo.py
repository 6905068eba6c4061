"""``make demo`` trains the digits example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_make_demo_trains_the_digits(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    environment.update(DTSLURM_LOCAL_STATE=str(tmp_path / "local"), XDG_STATE_HOME=str(tmp_path / "state"))
    done = subprocess.run(
        ["make", "demo", f"VENV={Path(sys.executable).parents[1]}", f"DEMO_RUNS={tmp_path / 'runs'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"test accuracy (0\.\d+|1)", done.stderr)
    assert match, done.stderr
    assert float(match[1]) >= 0.97
    for label in ("results", "script", "rank logs"):
        [path] = re.findall(rf"^  {label} +(/.*)$", done.stderr, re.MULTILINE)
        assert Path(path).exists()
    for rank in range(2):
        assert f"[{rank}] " in done.stdout
