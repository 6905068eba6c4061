"""The short form: a few schedules, with what can be broken quickly. ``make nemesis`` is the long one."""

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
    """A process of its own, for it becomes a login node of a cluster of its own."""
    words = [sys.executable, "-m", "tests.nemesis", "--seed", str(seed)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bodies"] or result["states"].get("CANCELLED"), result  # before they could start
    assert result["looks"]
    assert not result["violations"]
