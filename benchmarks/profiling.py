"""The step time of a rank while `dtslurm profile` observes another one.

Two ranks train on cluster `local`, each on a CPU of its own. Rank 0 is profiled with py-spy, which runs on
the CPU of rank 0, as it would on the node of that rank. In turn, rank 1 runs for some seconds while nothing
is profiled and while rank 0 is; its median step times are compared. "Apart": the ranks only compute.
"Together": each step ends with an all-reduce, so that rank 1 waits for rank 0 if the profile slows that down.

Run it with ``python -m benchmarks.profiling``.
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

from benchmarks.charts import Chart, compare_rounds, print_charts
from tests.waiting import wait_until

ROUNDS, SECONDS = 12, 4
DTSLURM = str(Path(sys.executable).with_name("dtslurm"))
QUIET, PROFILED = "nothing is profiled", "rank 0 is profiled with py-spy"
TRAIN = """\
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
os.sched_setaffinity(0, {rank})
torch.set_num_threads(1)
together = sys.argv[1] == "together"
if together:
    dist.init_process_group("gloo")
numbers = torch.ones(300, 300)
with open(f"steps-{rank}", "w", buffering=1) as file:
    while True:
        begin = time.monotonic()
        for _ in range(10):
            torch.mm(numbers, numbers)
        if together:
            dist.all_reduce(numbers)
            numbers.fill_(1)
        file.write(f"{begin} {time.monotonic() - begin}\\n")
"""


def main() -> None:
    """Measure and print."""
    charts = []
    for way in ("apart", "together"):
        with tempfile.TemporaryDirectory(prefix="dtslurm-benchmark-") as name:
            charts.append(measure(Path(name), way))
    print_charts(charts)


def measure(folder: Path, way: str) -> Chart:
    """Return the chart of the step times of rank 1 in a training."""
    (folder / "train.py").write_text(TRAIN)
    environment = {**os.environ, "HOME": str(folder), "DTSLURM_RUN_ROOT": str(folder / "runs")}
    environment.pop("XDG_STATE_HOME", None)

    def run(*words: str) -> str:
        argv = [DTSLURM, *words]
        done = subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        return done.stdout

    layout = ["--ntasks-per-node", "2", "-l", "srun", "-t", "30"]
    job = run(
        "submit",
        "--cluster",
        "local",
        "--parsable",
        "--no-sample",
        *layout,
        "--python",
        sys.executable,
        "train.py",
        way,
    ).strip()
    try:
        wait_until(lambda: (folder / "steps-1").exists() and len(read_steps(folder)) > 50)
        times: dict[str, list[float]] = {QUIET: [], PROFILED: []}
        for _ in range(ROUNDS):
            times[QUIET].append(median_step(folder, lambda: time.sleep(SECONDS)))
            times[PROFILED].append(median_step(folder, lambda: profile(job, folder, environment)))
    finally:
        run("cancel", job)
    return compare_rounds(f"A step of rank 1, ranks {way}", "ms", QUIET, times)


def profile(job: str, folder: Path, environment: dict[str, str]) -> None:
    """Profile rank 0, on the CPU of rank 0."""
    argv = ["taskset", "-c", "0", DTSLURM, "profile", job, "--rank", "0", "--seconds", str(SECONDS), "--json"]
    done = subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    [summary] = json.loads(done.stdout)["profiles"]
    if summary["seconds"] < SECONDS / 2:
        raise RuntimeError(f"py-spy saw {summary['seconds']} s of {SECONDS}")


def median_step(folder: Path, act: Callable[[], None]) -> float:
    """Return the median step time of rank 1 in ms while something is done."""
    begin = time.monotonic()
    act()
    end = time.monotonic()
    return statistics.median(length for start, length in read_steps(folder) if begin < start < end) * 1000


def read_steps(folder: Path) -> list[tuple[float, float]]:
    """Return the begin and the length of each step of rank 1 so far, in seconds."""
    lines = (folder / "steps-1").read_text().split("\n")[:-1]
    return [(float(start), float(length)) for start, length in map(str.split, lines)]


if __name__ == "__main__":
    main()
