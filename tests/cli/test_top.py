"""``dtslurm top`` on a dumb terminal and with an unknown theme."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import Run


def test_top_on_a_dumb_terminal_prints_one_frame_as_text(tmp_path: Path) -> None:
    here, there = os.openpty()
    env = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "dtslurm", "top"]
    done = subprocess.run(words, cwd=tmp_path, env=env, stdin=there, stdout=there, timeout=600, check=False)
    os.close(there)
    said = os.read(here, 65536)
    assert (done.returncode, b"\x1b" in said, b"no runs" in said) == (0, False, True)


def test_top_refuses_an_unknown_theme(invoke: Run) -> None:
    assert "no theme 'nope' (available: nord, " in invoke("top", "--once", "--theme", "nope", code=2).stderr
    assert "no runs" in invoke("top", "--once", "--theme", "nord", code=0).stdout
