"""The short form of the soak: one round. ``make soak`` runs for an hour."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.soak.dashboard import OpenDashboard

ROOT = Path(__file__).parents[2]


@pytest.mark.slurm
@pytest.mark.slow
def test_soak_round_finds_no_leak(sshd_software: None) -> None:
    """The soak runs in a separate process, so that its memory and files are counted alone."""
    words = [sys.executable, "-m", "tests.soak", "--seconds", "0", "--rounds", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document = json.loads(done.stdout)
    assert document["found"] == []
    assert {"submit", "status", "follow", "logs", "cancel", "clean", "dashboard"} <= set(document["done"])


def test_open_dashboard_reports_a_killed_process() -> None:
    with closing(OpenDashboard()) as dashboard:
        os.kill(dashboard.pid, signal.SIGKILL)
        os.waitid(os.P_PID, dashboard.pid, os.WEXITED | os.WNOWAIT)
        assert [problem.split(" within")[0] for problem in dashboard.problems()] == ["top ended with -9"]


def test_open_dashboard_reports_no_problem_after_a_page_visit() -> None:
    with closing(OpenDashboard()) as dashboard:
        dashboard.visit_a_page()
        assert dashboard.memory_mib() > 10
        assert dashboard.problems() == []
