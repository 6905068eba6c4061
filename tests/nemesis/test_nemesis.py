"""The short form of the nemesis: a few schedules with fast faults. ``make nemesis`` is the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize("seed", [18, 34])
def test_schedule_breaks_no_promise(seed: int) -> None:
    """The schedule runs in a separate process, because it becomes the login node of its cluster."""
    words = [sys.executable, "-m", "tests.nemesis", "--seed", str(seed)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bodies"] or result["states"].get("CANCELLED"), result  # before they could start
    assert result["looks"]
    assert not result["violations"]
