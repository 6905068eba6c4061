"""How soon the result of a function, and the end of a cancelled one, is seen, beside submitit's executor.

A real Slurm on this machine, which should be idle; dtslurm and submitit in turns, after one job of each:

- from ``submit()`` to ``result()`` of one job and of ``map_array`` of 16, and the requests to the controller
  and to accounting meanwhile;
- one ``submit()``, without submitit's pause of 0.2 s between two;
- from ``cancel()`` of a running and of a pending job until ``done()`` returns True;
- without either: the start of the last of 16 bare jobs under ``--export=NONE``, as dtslurm's scripts have it,
  and ``--export=ALL``. With NONE Slurm reads the user's environment by ``su`` on the node, and pauses for a
  second if ``su`` has not ended yet.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar, Chart, chart, middle, show
from benchmarks.submission import asked, executors, idle, run_slurm

ROUNDS, CANCELS = 9, 3
ARRAY = 16
POLL_S = 0.05
_AFTERWARDS_S = 2.0  # for what a job asks after its result
Rounds = dict[str, list[float]]


def run_one(executor: Any) -> None:
    """Submit one function and wait for its result."""
    assert executor.submit(abs, -1).result() == 1


def run_sixteen(executor: Any) -> None:
    """Submit 16 functions as one array and wait for all results."""
    assert [job.result() for job in executor.map_array(abs, range(ARRAY))] == list(range(ARRAY))


def time_results(
    by_name: dict[str, Any], work: Callable[[Any], None], calls: Callable[[], dict[str, int]]
) -> tuple[Rounds, Rounds]:
    """Return the seconds of each round, and the requests to the controller and to accounting."""
    seconds: Rounds = {name: [] for name in by_name}
    requests: Rounds = {name: [] for name in by_name}
    for number in range(ROUNDS):
        for name in sorted(by_name, reverse=bool(number % 2)):
            calls()
            before, begin = asked(), time.perf_counter()
            work(by_name[name])
            seconds[name].append(time.perf_counter() - begin)
            time.sleep(_AFTERWARDS_S)
            requests[name].append(asked() - before + calls()["sacct"])
            idle()
    return seconds, requests


def time_submit(by_name: dict[str, Any]) -> Rounds:
    """Return the seconds of single submissions, in turns."""
    seconds: Rounds = {name: [] for name in by_name}
    for _ in range(ROUNDS * 2):
        for name, executor in by_name.items():
            time.sleep(0.3)  # longer than submitit's pause
            begin = time.perf_counter()
            executor.submit(abs, 1)
            seconds[name].append(time.perf_counter() - begin)
    idle()
    return seconds


def time_cancel(by_name: dict[str, Any], state: str) -> Rounds:
    """Return the seconds from cancelling a job in this state until it is seen as done."""
    seconds: Rounds = {name: [] for name in by_name}
    for _ in range(CANCELS):
        for name, executor in by_name.items():
            job = executor.submit(time.sleep, 200)
            while state not in squeue("%T"):
                time.sleep(POLL_S)
            time.sleep(2.0)  # the function has begun
            begin = time.perf_counter()
            job.cancel()
            while not job.done():
                time.sleep(POLL_S)
            seconds[name].append(time.perf_counter() - begin)
            idle()
    return seconds


def time_bare_arrays() -> Rounds:
    """Return the seconds from sbatch until the last job of an array has started."""
    seconds: Rounds = {"--export=NONE": [], "--export=ALL": []}
    script = Path("bare.sh")
    script.write_text("#!/bin/bash\ndate +%s.%N >started-$SLURM_ARRAY_TASK_ID\n")
    for _ in range(ROUNDS):
        for option, values in seconds.items():
            begin = time.time()
            words = ["sbatch", "--wait", option, f"--array=0-{ARRAY - 1}", "--output=/dev/null", str(script)]
            subprocess.run(words, check=True, capture_output=True)
            paths = [Path(f"started-{number}") for number in range(ARRAY)]
            values.append(max(float(path.read_text()) for path in paths) - begin)
            for path in paths:
                path.unlink()
    return seconds


def squeue(form: str) -> str:
    """Return what squeue says of all jobs, in a format of its own."""
    return subprocess.run(["squeue", "-h", "-o", form], check=True, capture_output=True, text=True).stdout


def set_partition(state: str) -> None:
    """Set whether jobs start."""
    subprocess.run(["scontrol", "update", "partition=main", f"state={state}"], check=True)


def compare(title: str, unit: str, kind: str, rounds: Rounds) -> Chart:
    """Return a chart with ratios to submitit; its bars carry the kind, as names are unique on the page."""
    return chart(
        title, unit, f"{kind}: submitit", {f"{kind}: {name}": values for name, values in rounds.items()}
    )


def measure(calls: Callable[[], dict[str, int]]) -> list[Chart]:
    """Measure everything on the Slurm that is up."""
    by_name = {name: make(name) for name, make in executors().items()}
    for executor in by_name.values():
        run_one(executor)
    idle()
    charts, bars = [], []
    for kind, work in (("one job", run_one), (f"array of {ARRAY}", run_sixteen)):
        seconds, requests = time_results(by_name, work, calls)
        charts.append(compare(f"From submit() to the last result, {kind}", "s", kind, seconds))
        bars += [Bar(f"{kind}, requests: {name}", *middle(values)) for name, values in requests.items()]
    charts.append(Chart("Requests to the controller and to accounting", "of each round", "", tuple(bars)))
    charts.append(compare("One submit()", "s", "submit()", time_submit(by_name)))
    running = time_cancel(by_name, "RUNNING")
    charts.append(compare("From cancel() of a running job until it is seen", "s", "running", running))
    set_partition("down")
    pending = time_cancel(by_name, "PENDING")
    set_partition("up")
    charts.append(compare("From cancel() of a pending job until it is seen", "s", "pending", pending))
    title = f"From sbatch to the start of the last of {ARRAY} bare jobs"
    charts.append(chart(title, "s", "--export=ALL", time_bare_arrays()))
    return charts


def main() -> None:
    """Bring up a Slurm, measure in it, and print."""
    logging.disable(logging.WARNING)  # submitit warns of each cancelled job
    with run_slurm() as calls:
        show(measure(calls))


if __name__ == "__main__":
    main()
