"""A site whose Slurm answers as told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCONTROL = """\
#!/bin/sh
echo "$@" >>{folder}/asked
refuse() {{
  [ -s "$1" ] || return 0
  head -n 1 "$1"
  sed -i 1d "$1"
  exit 1
}}
case "$1" in
show)
  [ "$2" != hostnames ] || [ -z "$3" ] || {{ echo "$3" | tr , '\\n'; exit; }}
  refuse {folder}/silence
  cat {folder}/state
  ;;
requeue) refuse {folder}/refusals ;;
esac
"""
SBATCH = """\
#!/bin/sh
echo "sbatch $@ ${{SLURM_JOB_ID-none}} ${{DTSLURM_RUN_DIR-none}}" >>{folder}/asked
[ -s {folder}/lost ] && cat {folder}/lost && exit 1
echo '18;lab'
"""
SINFO = """\
#!/bin/sh
cat {folder}/nodes
"""
SQUEUE = """\
#!/bin/sh
cat {folder}/queue
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("scontrol", SCONTROL),
        ("sbatch", SBATCH),
        ("squeue", SQUEUE),
        ("sinfo", SINFO),
    ):
        program = tmp_path / "bin" / name
        program.write_text(text.format(folder=tmp_path))
        program.chmod(0o700)
    (tmp_path / "state").write_text("JobId=17 JobState=RUNNING Comment=dtslurm:abc:def\n")
    (tmp_path / "nodes").write_text("".join(f"n{number} (null)\n" for number in range(1, 10)))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def slurm_requests(site: Path) -> list[str]:
    """Return what was asked of the site's Slurm, but for looks."""
    lines = (site / "asked").read_text().splitlines() if (site / "asked").exists() else []
    return [line for line in lines if not line.startswith("show")]
