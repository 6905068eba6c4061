"""What our script and supervisor cost a job, beside a script of two lines that one writes by hand.

``python -m benchmarks.overhead`` queues the same training on a Slurm of its own in turns: by a bare script,
by `dtslurm submit`, and with the supervisor in the job (`--max-restarts`). It tells the time from the call of
sbatch to the first step, and that of a step of plain computing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import chart, show
from tests.lab.cluster import SlurmLab

ROUNDS = 7
PATIENCE_S = 120.0
TRAIN = """\
import json, os, sys, time
first, steps = time.time(), []
while len(steps) < 400:
    begin = time.perf_counter()
    sum(number * number for number in range(30_000))
    steps.append(time.perf_counter() - begin)
with open(sys.argv[1] + "~", "w") as file:
    json.dump([first, steps], file)
os.rename(sys.argv[1] + "~", sys.argv[1])
"""
BARE = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --time=5
srun {python} train.py "$1"
"""
STAND_IN = """\
#!/bin/sh
date +%s.%N >{folder}/called
exec {sbatch} "$@"
"""


def ways(lab: SlurmLab, folder: Path) -> dict[str, Callable[[Path], object]]:
    """Return the ways to queue a training that tells its times in a file."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "bare.sh").write_text(BARE.format(python=sys.executable))
    programs = folder / "counted"
    programs.mkdir()
    (programs / "sbatch").write_text(STAND_IN.format(folder=folder, sbatch=lab.program("sbatch")))
    (programs / "sbatch").chmod(0o755)
    own = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
    own |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    env = {**lab.environ(), **own}
    env["PATH"] = f"{programs}:{env['PATH']}"

    def run(*argv: str) -> None:
        subprocess.run(argv, env=env, cwd=folder, check=True, capture_output=True)

    ours = (sys.executable, "-m", "dtslurm", "submit", "-l", "srun", "-t", "5", "--no-snapshot")
    return {
        "bare script": lambda told: run("sbatch", "bare.sh", str(told)),
        "dtslurm": lambda told: run(*ours, "--python", sys.executable, "train.py", str(told)),
        "dtslurm, supervised": lambda told: run(
            *ours, "--max-restarts", "3", "--python", sys.executable, "train.py", str(told)
        ),
    }


def once(folder: Path, queue: Callable[[Path], object], told: Path) -> tuple[float, float]:
    """Queue a training and wait for it; return seconds to its first step, and the milliseconds of a step."""
    queue(told)
    end = time.monotonic() + PATIENCE_S
    while not told.exists():
        if time.monotonic() > end:
            raise TimeoutError("it did not train")
        time.sleep(0.1)
    first, steps = json.loads(told.read_text())
    return first - float((folder / "called").read_text()), statistics.median(steps) * 1000


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name, SlurmLab(Path(name)) as lab:
        folder = Path(name) / "user"
        folder.mkdir()
        queues = ways(lab, folder)
        begins: dict[str, list[float]] = {way: [] for way in queues}
        steps: dict[str, list[float]] = {way: [] for way in queues}
        failed: dict[str, str] = {}
        for number in range(ROUNDS + 1):  # the first round warms up
            for way, queue in queues.items():
                try:
                    begin, step = once(folder, queue, folder / f"{way}-{number}".replace(" ", "-"))
                except (TimeoutError, subprocess.CalledProcessError) as error:
                    failed[way] = str(error)
                    continue
                if number:
                    begins[way].append(begin)
                    steps[way].append(step)
                lab.wait_idle()
    show(
        [
            chart("From sbatch to the first step", "s", "bare script", begins, failed),
            chart("A step of computing", "ms", "bare script", steps, failed),
        ]
    )
    print(f"load when it ended: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
