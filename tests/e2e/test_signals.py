"""The early signal reaches training code under every launcher, in time and without ending anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.lab.cluster import SlurmLab

pytestmark = pytest.mark.slurm

WAITS = """
    import os, signal, sys, time
    heard = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    print("ready", flush=True)
    end = time.time() + 60
    while not heard and time.time() < end:
        time.sleep(0.1)
    print("heard", heard, flush=True)
    sys.exit(85 if heard else 1)
"""


@pytest.mark.proves("launcher", "signal")
@pytest.mark.parametrize("launcher", ["single", "srun", "torchrun"])
def test_the_early_signal_reaches_every_rank(launcher: str, tmp_path: Path, slurm_lab: SlurmLab) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**slurm_lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    place = [] if launcher == "single" else ["-N2", "--ntasks-per-node", "2"]
    words = [*place, "-l", launcher, "--signal-before", "60", "--python", sys.executable, cli.script(WAITS)]
    job = cli.submit(*words)
    run, world = cli.run_dir(job), 1 if launcher == "single" else 4
    texts = [run.logs(0) / f"rank-{rank}.log" for rank in range(world)]
    cli.until(lambda: all(path.is_file() and "ready" in path.read_text() for path in texts))
    slurm_lab.run(["scancel", "--signal=USR2", job])  # to every process of the step, as at the time limit
    status = cli.end(job, limit=90)["statuses"][0]
    assert [path.read_text().splitlines()[-1] for path in texts] == ["heard [12]"] * world
    assert [record.exit_code for record in run.ranks(0)] == [85] * world
    assert (status["state"], status["exit_code"]) == ("FAILED", 85)
