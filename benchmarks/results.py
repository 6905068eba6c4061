"""The time until the result or the cancellation of a function is visible, beside submitit's executor.

The benchmark starts a Slurm on this machine, which should be idle. The executors of dtslurm and submitit run
alternately, after one job of each that is not counted. The charts show the time

- from ``submit()`` to ``result()`` of one job, and from ``map_array()`` to the results of 16 functions, with
  the requests to the controller and to accounting during this time;
- of one ``submit()``, without the pause of 0.2 s that submitit makes between two submissions;
- from ``cancel()`` of a running and of a pending job until ``done()`` returns True;
- from sbatch to the start of the last of 16 bare jobs, with ``--export=NONE``, which dtslurm's scripts use,
  and with ``--export=ALL``. With NONE, Slurm reads the user's environment with ``su`` on the node, and waits
  for another second if ``su`` has not ended.

Run it with ``python -m benchmarks.results``.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.charts import Bar, Chart, compare_rounds, median_and_quartiles, print_charts
from benchmarks.submission import count_requests, executor_factories, start_slurm, wait_until_queue_is_empty

ROUNDS, CANCELS = 9, 3
ARRAY_SIZE = 16
REFERENCE = "submitit"
POLL_S = 0.05
SETTLE_S = 2.0  # a method may send more requests after the result
Rounds = dict[str, list[float]]


def run_one(executor: Any) -> None:
    """Submit one function and wait for its result."""
    assert executor.submit(abs, -1).result() == 1


def run_array(executor: Any) -> None:
    """Submit ``ARRAY_SIZE`` functions as one array and wait for all results."""
    assert [job.result() for job in executor.map_array(abs, range(ARRAY_SIZE))] == list(range(ARRAY_SIZE))


def time_results(
    executors: dict[str, Any], work: Callable[[Any], None], count_calls: Callable[[], dict[str, int]]
) -> tuple[Rounds, Rounds]:
    """Return the seconds of each round, and the requests to the controller and to accounting."""
    seconds: Rounds = {name: [] for name in executors}
    requests: Rounds = {name: [] for name in executors}
    for number in range(ROUNDS):
        for name in sorted(executors, reverse=bool(number % 2)):
            count_calls()
            requests_before, start = count_requests(), time.perf_counter()
            work(executors[name])
            seconds[name].append(time.perf_counter() - start)
            time.sleep(SETTLE_S)
            requests[name].append(count_requests() - requests_before + count_calls()["sacct"])
            wait_until_queue_is_empty()
    return seconds, requests


def time_submit(executors: dict[str, Any]) -> Rounds:
    """Return the seconds of single submissions; the executors submit alternately."""
    seconds: Rounds = {name: [] for name in executors}
    for _ in range(ROUNDS * 2):
        for name, executor in executors.items():
            time.sleep(0.3)  # longer than submitit's pause
            start = time.perf_counter()
            executor.submit(abs, 1)
            seconds[name].append(time.perf_counter() - start)
    wait_until_queue_is_empty()
    return seconds


def time_cancel(executors: dict[str, Any], state: str) -> Rounds:
    """Return the seconds from the cancellation of a job in this state until ``done()`` is true."""
    seconds: Rounds = {name: [] for name in executors}
    for _ in range(CANCELS):
        for name, executor in executors.items():
            job = executor.submit(time.sleep, 200)
            while state not in list_queue("%T"):
                time.sleep(POLL_S)
            time.sleep(2.0)  # until the function has started
            start = time.perf_counter()
            job.cancel()
            while not job.done():
                time.sleep(POLL_S)
            seconds[name].append(time.perf_counter() - start)
            wait_until_queue_is_empty()
    return seconds


def time_bare_arrays() -> Rounds:
    """Return the seconds from sbatch until the last job of an array has started."""
    seconds: Rounds = {"--export=NONE": [], "--export=ALL": []}
    script = Path("bare.sh")
    script.write_text("#!/bin/bash\ndate +%s.%N >started-$SLURM_ARRAY_TASK_ID\n")
    for _ in range(ROUNDS):
        for option, values in seconds.items():
            start = time.time()
            argv = [
                "sbatch",
                "--wait",
                option,
                f"--array=0-{ARRAY_SIZE - 1}",
                "--output=/dev/null",
                str(script),
            ]
            subprocess.run(argv, check=True, capture_output=True)
            paths = [Path(f"started-{number}") for number in range(ARRAY_SIZE)]
            values.append(max(float(path.read_text()) for path in paths) - start)
            for path in paths:
                path.unlink()
    return seconds


def list_queue(columns: str) -> str:
    """Return the output of squeue for all jobs, in a format of squeue's option ``-o``."""
    return subprocess.run(["squeue", "-h", "-o", columns], check=True, capture_output=True, text=True).stdout


def set_partition(state: str) -> None:
    """Set the state of the partition: up, or down to keep jobs pending."""
    subprocess.run(["scontrol", "update", "partition=main", f"state={state}"], check=True)


def measure(count_calls: Callable[[], dict[str, int]]) -> list[Chart]:
    """Measure on the Slurm that is running."""
    executors = {name: create(name) for name, create in executor_factories().items()}
    for executor in executors.values():
        run_one(executor)
    wait_until_queue_is_empty()
    charts, bars = [], []
    for kind, title, work in (
        ("one job", "From submit() to the result of one job", run_one),
        ("array", f"From map_array() to the results of {ARRAY_SIZE} functions", run_array),
    ):
        seconds, requests = time_results(executors, work, count_calls)
        charts.append(compare_rounds(title, "s", REFERENCE, seconds))
        bars += [Bar(f"{name}, {kind}", *median_and_quartiles(values)) for name, values in requests.items()]
    charts.append(Chart("Requests to the controller and to accounting", "per round", "", tuple(bars)))
    charts.append(compare_rounds("One submit()", "s", REFERENCE, time_submit(executors)))
    title = "From cancel() of a running job until done() is true"
    charts.append(compare_rounds(title, "s", REFERENCE, time_cancel(executors, "RUNNING")))
    set_partition("down")
    pending = time_cancel(executors, "PENDING")
    set_partition("up")
    title = "From cancel() of a pending job until done() is true"
    charts.append(compare_rounds(title, "s", REFERENCE, pending))
    title = f"From sbatch to the start of the last of {ARRAY_SIZE} bare jobs"
    charts.append(compare_rounds(title, "s", "--export=ALL", time_bare_arrays()))
    return charts


def main() -> None:
    """Start a Slurm, measure in it, and print."""
    logging.disable(logging.WARNING)  # submitit prints a warning for each cancelled job
    with start_slurm() as count_calls:
        print_charts(measure(count_calls))


if __name__ == "__main__":
    main()
