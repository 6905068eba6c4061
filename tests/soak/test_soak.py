"""The short form: a round of everything. ``make soak`` is an hour of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slurm
@pytest.mark.slow
def test_a_round_leaves_nothing_behind(sshd_software: None) -> None:
    """A process of its own, whose memory and files are its own."""
    words = [sys.executable, "-m", "tests.soak", "--seconds", "0", "--rounds", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = json.loads(done.stdout)
    assert told["found"] == []
    assert {"submit", "status", "follow", "logs", "cancel", "clean"} <= set(told["done"])
