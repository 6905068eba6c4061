"""The cost of submitting many jobs, beside a bare ``sbatch --array`` and submitit's Slurm executor.

The benchmark starts a Slurm on this machine. Each part runs dtslurm and its peer alternately:

- ``trials``: 1,000 trials of a sweep, and ``sbatch --array=0-999`` of the same script. It shows the seconds
  and the requests to the controller, for the first and the second submission of a process and for the
  command. The jobs are held, so that none of them runs during the measurement.
- ``completion``: the time from the command until the last of 100 trials has finished, and the same for an
  array script written by hand.
- ``functions``: ``map_array`` of 100 functions until all results are available, and the calls of squeue and
  sacct.
- ``singles``: 100 single submissions with `dtslurm.Executor` and with submitit, which pauses between two
  submissions, while the partition is down.

Run it with ``python -m benchmarks.submission [PART]... [--json]``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.cluster import SlurmLab

ROUNDS = 3
TRIALS, SHORT_TRIALS, FUNCTIONS, SINGLES, BLOCK = 1000, 100, 100, 100, 20
COUNTED_COMMANDS = ("sbatch", "squeue", "sacct")
JOB = """\
cluster: slurm
script: train.py
python: %s
time: 5
args: ["${x}"]
sweep: {grid: {x: [%s]}%s}
"""
ARRAY = """\
#!/bin/bash
#SBATCH --time=5 --array=0-%d --output=array-%%a.log
values=(%s)
exec %s train.py ${values[$SLURM_ARRAY_TASK_ID]}
"""
TRAIN = """\
import sys

print("trained with", sys.argv[1])
open(f"done/{sys.argv[1]}", "x").close()
"""
# Requests of nodes and of the controller itself, and those of sdiag, which counts them.
NOT_FROM_USERS = re.compile(r"MESSAGE_|REQUEST_(STATS_INFO|COMPLETE|STEP_COMPLETE|PERSIST|FED)|ACCOUNTING")


@contextmanager
def count_commands(folder: Path) -> Iterator[Callable[[], dict[str, int]]]:
    """Put wrappers of Slurm commands on the PATH; yield a function that returns and resets their calls."""
    folder.mkdir()
    for name in COUNTED_COMMANDS:
        program = shutil.which(name)
        (folder / name).write_text(
            f'#!/bin/sh\ntest=$1\n[ "$1" = --test-only ] || test=\necho {name} $test >>{folder}/calls\n'
            f'exec {program} "$@"\n'
        )
        (folder / name).chmod(0o755)
    path_before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{path_before}"

    def count_calls() -> dict[str, int]:
        path = folder / "calls"
        words = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return {name: words.count(name) for name in COUNTED_COMMANDS} | {"tested": words.count("--test-only")}

    try:
        yield count_calls
    finally:
        os.environ["PATH"] = path_before


def time_command(*argv: str) -> float:
    """Return the seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - start


def count_requests() -> int:
    """Return the number of requests of users that the controller has served so far."""
    report = subprocess.run(["sdiag"], check=True, capture_output=True, text=True).stdout
    by_type = report.partition("statistics by message type")[2].partition("statistics by user")[0]
    matches = re.findall(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", by_type, re.MULTILINE)
    return sum(int(count) for kind, count in matches if not NOT_FROM_USERS.match(kind))


def submit_job_file(context: Any, *options: str) -> list[Any]:
    """Submit job.yaml as `dtslurm submit` does, in this process; return the records of the runs."""
    from dtslurm.services.request.request import JobRequest
    from dtslurm.services.submit.job_file import load_jobs
    from dtslurm.services.submit.stages import plan, queue

    request = JobRequest(script="job.yaml", sbatch=options)
    return queue(context, plan(context, load_jobs(context, request), confirm=lambda _: True))


def write_sweep(count: int, options: str = "") -> str:
    """Write a job file with a sweep of this many trials, and return the values of the trials."""
    values = range(count)
    Path("job.yaml").write_text(JOB % (json.dumps(sys.executable), ", ".join(map(str, values)), options))
    Path("job.yaml").chmod(0o644)
    return " ".join(map(str, values))


def measure_trials(count_calls: Callable[[], dict[str, int]]) -> dict[str, Any]:
    """Submit a sweep, and the same script as a bare array; the jobs are held, so that none runs meanwhile."""
    from dtslurm.services.wiring.context import Context

    write_sweep(TRIALS, ", max_parallel: 1")
    seconds: dict[str, list[float]] = {name: [] for name in ("first", "second", "command", "bare")}
    requests: dict[str, int] = {}
    sbatch_calls: dict[str, int] = {}
    script = ""
    for _ in range(ROUNDS):
        context = Context()
        for name in ("first", "second"):
            count_calls()
            requests_before, start = count_requests(), time.perf_counter()
            [record] = submit_job_file(context, "--hold")
            seconds[name].append(time.perf_counter() - start)
            requests[name], sbatch_calls[name] = count_requests() - requests_before, count_calls()["sbatch"]
            script = f"{record.run_dir}/script.sbatch"
        requests_before = count_requests()
        array = f"--array=0-{TRIALS - 1}%1"
        seconds["bare"].append(time_command("sbatch", "--parsable", "--hold", array, script))
        requests["bare"] = count_requests() - requests_before
        command = [sys.executable, "-m", "dtslurm", "submit", "job.yaml", "--sbatch=--hold"]
        count_calls()
        seconds["command"].append(time_command(*command))
        calls = count_calls()
        sbatch_calls["queueing"] = calls["sbatch"] - calls["tested"]
        subprocess.run(["scancel", "--user", str(os.getuid())], check=True)
    return {"seconds": seconds, "requests": requests, "sbatch": sbatch_calls}


def measure_completion() -> dict[str, list[float]]:
    """Return the seconds until the last trial has finished, for a sweep and for an array written by hand."""
    values = write_sweep(SHORT_TRIALS)
    Path("array.sh").write_text(ARRAY % (SHORT_TRIALS - 1, values, sys.executable))
    Path("train.py").write_text(TRAIN)
    seconds: dict[str, list[float]] = {"dtslurm": [], "array": []}
    for _ in range(ROUNDS - 1):
        for name, command in (
            ("array", ("sbatch", "array.sh")),
            ("dtslurm", (sys.executable, "-m", "dtslurm", "submit", "job.yaml")),
        ):
            Path("done").mkdir()
            start = time.perf_counter()
            time_command(*command)
            while len(list(Path("done").iterdir())) < SHORT_TRIALS:
                time.sleep(0.05)
            seconds[name].append(time.perf_counter() - start)
            shutil.rmtree("done")
            wait_until_queue_is_empty()
    return seconds


def wait_until_queue_is_empty() -> None:
    """Wait until squeue lists no job."""
    while subprocess.run(["squeue", "--noheader"], check=True, capture_output=True).stdout:
        time.sleep(0.5)


def executor_factories() -> dict[str, Callable[[str], Any]]:
    """Return functions that create an executor in a folder, by the name of the tool."""
    import submitit

    import dtslurm

    logging.getLogger("submitit").setLevel(logging.WARNING)  # the import of submitit sets another level

    def create_dtslurm(folder: str) -> Any:
        executor = dtslurm.Executor(folder, profile="slurm")
        executor.update_parameters(time=5, python=sys.executable)
        return executor

    def create_submitit(folder: str) -> Any:
        executor = submitit.SlurmExecutor(folder)
        executor.update_parameters(time=5)
        return executor

    return {"dtslurm": create_dtslurm, "submitit": create_submitit}


def measure_functions(count_calls: Callable[[], dict[str, int]]) -> dict[str, list[dict[str, Any]]]:
    """Run functions as one array until the last result is available."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(ROUNDS - 1):
        for name, create in executor_factories().items():
            executor = create(f"map-{name}-{number}")
            count_calls()
            start = time.perf_counter()
            jobs = executor.map_array(abs, range(FUNCTIONS))
            submitted = time.perf_counter() - start
            assert [job.result() for job in jobs] == list(range(FUNCTIONS))
            wall = time.perf_counter() - start
            rounds.setdefault(name, []).append({"wall_s": wall, "queued_s": submitted, **count_calls()})
            wait_until_queue_is_empty()
    return rounds


def measure_singles() -> dict[str, list[float]]:
    """Submit functions one by one, in alternating blocks; return the seconds of a submission for each block.

    submitit sleeps 0.2 s between submissions; it is also measured without this pause.
    """
    factories = executor_factories()
    factories["unpaused"] = factories["submitit"]
    executors = {name: create(f"single-{name}") for name, create in factories.items()}
    seconds: dict[str, list[float]] = {name: [] for name in executors}
    setattr(executors["unpaused"], "_throttle", lambda: None)  # noqa: B010 - submitit's function that pauses
    subprocess.run(["scontrol", "update", "partition=main", "state=down"], check=False, capture_output=True)
    for first in range(0, SINGLES, BLOCK):
        for name, executor in executors.items():
            start = time.perf_counter()
            for number in range(first, first + BLOCK):
                executor.submit(abs, number)
            seconds[name].append((time.perf_counter() - start) / BLOCK)
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True)
    subprocess.run(["scontrol", "update", "partition=main", "state=up"], check=False, capture_output=True)
    return seconds


@contextmanager
def start_slurm() -> Iterator[Callable[[], dict[str, int]]]:
    """Start a Slurm, and change to a user's folder beside it; yield the function of `count_commands`."""
    with (
        tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name,
        SlurmLab(Path(name), accounting=True) as lab,
    ):
        folder = Path(name) / "user"
        folder.mkdir()
        os.environ.update(lab.environ({"DTSLURM_RUN_ROOT": str(folder / "runs")}))
        os.environ.update({f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")})
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        os.chdir(folder)
        with count_commands(folder / "bin") as count_calls:
            yield count_calls


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Start a Slurm and measure the named parts in it, or all parts."""
    with start_slurm() as count_calls:
        Path("train.py").write_text("print(1)\n")
        parts: dict[str, Callable[[], Any]] = {
            "trials": lambda: measure_trials(count_calls),
            "singles": measure_singles,
            "functions": lambda: measure_functions(count_calls),
            "completion": measure_completion,
        }
        return {part: work() for part, work in parts.items() if not names or part in names}


def describe_spread(values: Sequence[float]) -> str:
    """Return the median and the range in words."""
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def describe_ratio(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the ratio of the medians in words."""
    return f"{statistics.median(values) / statistics.median(reference):.2f} x"


def main() -> None:
    """Measure and print."""
    results = measure([word for word in sys.argv[1:] if not word.startswith("-")])
    if "--json" in sys.argv[1:]:
        print(json.dumps(results))
        return
    if "trials" in results:
        print_trials(results["trials"])
    if "singles" in results:
        print_singles(results["singles"])
    if "functions" in results:
        print_functions(results["functions"])
    if "completion" in results:
        seconds = results["completion"]
        print(f"{SHORT_TRIALS} trials until the last has finished: {describe_spread(seconds['dtslurm'])}")
        ratio = describe_ratio(seconds["dtslurm"], seconds["array"])
        print(f"  array script written by hand {describe_spread(seconds['array'])}: {ratio}")


def print_trials(results: dict[str, Any]) -> None:
    """Print the cost of a sweep of 1,000 trials."""
    seconds, requests = results["seconds"], results["requests"]
    print(f"{TRIALS} trials: {results['sbatch']['queueing']} array queued by one sbatch")
    for name, label in (
        ("first", "first submission of a process"),
        ("second", "second submission of a process"),
        ("command", "dtslurm submit"),
    ):
        ratio = describe_ratio(seconds[name], seconds["bare"])
        print(f"  {label} {describe_spread(seconds[name])}: {ratio}", end="")
        print(f", {requests[name]} requests to the controller" if name in requests else "")
    print(f"  bare sbatch --array {describe_spread(seconds['bare'])}, {requests['bare']} requests")


def print_singles(seconds: dict[str, list[float]]) -> None:
    """Print the cost of one submission."""
    own, submitit, unpaused = seconds["dtslurm"], seconds["submitit"], seconds["unpaused"]
    spreads = f"{describe_spread(own)}; submitit {describe_spread(submitit)}"
    print(f"one submission, of {SINGLES}: {spreads}: {describe_ratio(own, submitit)}")
    print(f"  submitit without its pause {describe_spread(unpaused)}: {describe_ratio(own, unpaused)}")


def print_functions(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Print the cost of `map_array`."""
    wall = {name: [result["wall_s"] for result in results] for name, results in rounds.items()}
    calls = {
        name: max(result["squeue"] + result["sacct"] for result in results)
        for name, results in rounds.items()
    }
    spreads = f"{describe_spread(wall['dtslurm'])}; submitit {describe_spread(wall['submitit'])}"
    print(f"map_array of {FUNCTIONS}: {spreads}: {describe_ratio(wall['dtslurm'], wall['submitit'])}")
    print(f"  squeue and sacct calls: at most {calls['dtslurm']}; submitit {calls['submitit']}")


if __name__ == "__main__":
    main()
