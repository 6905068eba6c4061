"""The overhead of dtslurm's batch script and supervisor in a job, beside a hand-written script of two lines.

The benchmark submits the same training script with three methods: as a bare batch script, by `dtslurm
submit`, and by `dtslurm submit` with the supervisor in the job (`--max-restarts`). Every method starts the
ranks with `srun`. The first chart shows the time from the call of sbatch to the first training step, the
second chart the time of a step that only computes. The three jobs of a round run one after the other, in an
order that changes from round to round.

Run it with ``python -m benchmarks.overhead``.
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

from benchmarks.charts import compare_rounds, print_charts
from tests.lab.cluster import SlurmLab

ROUNDS = 7
TIMEOUT_S = 120.0
BARE = "bare script"
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
BARE_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --time=5
srun {python} train.py "$1"
"""
SBATCH_WRAPPER = """\
#!/bin/sh
date +%s.%N >{folder}/called
exec {sbatch} "$@"
"""


def submission_methods(lab: SlurmLab, folder: Path) -> dict[str, Callable[[Path], object]]:
    """Return functions that submit a training job, which writes its times to the file of the argument."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "bare.sh").write_text(BARE_SCRIPT.format(python=sys.executable))
    programs = folder / "wrappers"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH_WRAPPER.format(folder=folder, sbatch=lab.program("sbatch")))
    (programs / "sbatch").chmod(0o755)
    variables = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
    variables |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    env = {**lab.environ(), **variables}
    env["PATH"] = f"{programs}:{env['PATH']}"

    def run(*argv: str) -> None:
        subprocess.run(argv, env=env, cwd=folder, check=True, capture_output=True)

    submit = (sys.executable, "-m", "dtslurm", "submit", "-l", "srun", "-t", "5", "--no-snapshot")
    return {
        BARE: lambda times_file: run("sbatch", "bare.sh", str(times_file)),
        "dtslurm": lambda times_file: run(*submit, "--python", sys.executable, "train.py", str(times_file)),
        "dtslurm, supervised": lambda times_file: run(
            *submit, "--max-restarts", "3", "--python", sys.executable, "train.py", str(times_file)
        ),
    }


def time_job(folder: Path, submit: Callable[[Path], object], times_file: Path) -> tuple[float, float]:
    """Submit a job and wait for it; return the seconds to its first step and the milliseconds of a step."""
    submit(times_file)
    end = time.monotonic() + TIMEOUT_S
    while not times_file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the job did not end within {TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    first, steps = json.loads(times_file.read_text())
    return first - float((folder / "called").read_text()), statistics.median(steps) * 1000


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name, SlurmLab(Path(name)) as lab:
        folder = Path(name) / "user"
        folder.mkdir()
        methods = submission_methods(lab, folder)
        start_times: dict[str, list[float]] = {method: [] for method in methods}
        step_times: dict[str, list[float]] = {method: [] for method in methods}
        failed: dict[str, str] = {}
        for number in range(ROUNDS + 1):  # the first round warms up the page cache
            # The order changes, because the job before can influence when a job starts.
            rotation = number % len(methods)
            names = [*methods][rotation:] + [*methods][:rotation]
            for method in names:
                times_file = folder / f"{method}-{number}".replace(" ", "-")
                try:
                    start_time, step_time = time_job(folder, methods[method], times_file)
                except (TimeoutError, subprocess.CalledProcessError) as error:
                    failed[method] = str(error)
                    continue
                if number:
                    start_times[method].append(start_time)
                    step_times[method].append(step_time)
                lab.wait_idle()
    print_charts(
        [
            compare_rounds("From sbatch to the first training step", "s", BARE, start_times, failed),
            compare_rounds("A training step that only computes", "ms", BARE, step_times, failed),
        ]
    )
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
