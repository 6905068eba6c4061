"""What submitting many jobs costs, beside a bare ``sbatch --array`` and submitit's own Slurm executor.

A real Slurm on this machine. Each thing in turns with its peer, so that a busy moment hits both:

- ``trials``: 1,000 trials of a sweep, and ``sbatch --array=0-999`` of the same script: seconds, and what the
  controller is asked;
- ``ended``: trials of a sweep from the call until the last has done its work, and an array written by hand;
- ``functions``: ``map_array`` of 100 functions until all results are there, and the calls of squeue and sacct
  until then;
- ``singles``: 100 single submissions by `dtslurm.Executor` and by submitit's, which pauses between them.

``python -m benchmarks.submission [NAME]...``; ``--json`` for programs.
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
TRIALS, ENDED, FUNCTIONS, SINGLES, BLOCK = 1000, 100, 100, 100, 20
COUNTED = ("sbatch", "squeue", "sacct")
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
# What others than users' commands ask: nodes, the controller's own parts, and the question itself.
NOT_ASKED = re.compile(r"MESSAGE_|REQUEST_(STATS_INFO|COMPLETE|STEP_COMPLETE|PERSIST|FED)|ACCOUNTING")


@contextmanager
def counting(folder: Path) -> Iterator[Callable[[], dict[str, int]]]:
    """Put programs before Slurm's own that note each call; yield what tells how often each was called."""
    folder.mkdir()
    for name in COUNTED:
        real = shutil.which(name)
        (folder / name).write_text(
            f'#!/bin/sh\ntest=$1\n[ "$1" = --test-only ] || test=\necho {name} $test >>{folder}/calls\n'
            f'exec {real} "$@"\n'
        )
        (folder / name).chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{before}"

    def calls() -> dict[str, int]:
        path = folder / "calls"
        told = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return {name: told.count(name) for name in COUNTED} | {"tested": told.count("--test-only")}

    try:
        yield calls
    finally:
        os.environ["PATH"] = before


def ran(*argv: str) -> float:
    """Return how many seconds a command takes."""
    begin = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - begin


def asked() -> int:
    """Return how many requests of users the controller has served so far."""
    told = subprocess.run(["sdiag"], check=True, capture_output=True, text=True).stdout
    kinds = told.partition("statistics by message type")[2].partition("statistics by user")[0]
    found = re.findall(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", kinds, re.MULTILINE)
    return sum(int(count) for kind, count in found if not NOT_ASKED.match(kind))


def queued(context: Any, *options: str) -> list[Any]:
    """Submit job.yaml as the command does, in this process."""
    from dtslurm.services.request.request import JobRequest
    from dtslurm.services.submit.job_file import load_jobs
    from dtslurm.services.submit.stages import plan, queue

    said = JobRequest(script="job.yaml", sbatch=options)
    return queue(context, plan(context, load_jobs(context, said), confirm=lambda _: True))


def write_sweep(count: int, more: str = "") -> str:
    """Write a sweep of so many trials, and return their values."""
    values = range(count)
    Path("job.yaml").write_text(JOB % (json.dumps(sys.executable), ", ".join(map(str, values)), more))
    Path("job.yaml").chmod(0o644)
    return " ".join(map(str, values))


def trials(calls: Callable[[], dict[str, int]]) -> dict[str, Any]:
    """Submit a sweep, and the same script as a bare array; held, so that nothing runs meanwhile."""
    from dtslurm.services.wiring.context import Context

    write_sweep(TRIALS, ", max_parallel: 1")
    found: dict[str, list[float]] = {name: [] for name in ("ours", "again", "command", "bare")}
    requests: dict[str, int] = {}
    made: dict[str, int] = {}
    script = ""
    for _ in range(ROUNDS):
        context = Context()
        for name in ("ours", "again"):
            calls()
            before, begin = asked(), time.perf_counter()
            [record] = queued(context, "--hold")
            found[name].append(time.perf_counter() - begin)
            requests[name], made[name] = asked() - before, calls()["sbatch"]
            script = f"{record.run_dir}/script.sbatch"
        before = asked()
        found["bare"].append(ran("sbatch", "--parsable", "--hold", f"--array=0-{TRIALS - 1}%1", script))
        requests["bare"] = asked() - before
        command = [sys.executable, "-m", "dtslurm", "submit", "job.yaml", "--sbatch=--hold"]
        calls()
        found["command"].append(ran(*command))
        told = calls()
        made["queueing"] = told["sbatch"] - told["tested"]
        subprocess.run(["scancel", "--user", str(os.getuid())], check=True)
    return {"seconds": found, "requests": requests, "sbatch": made}


def ended() -> dict[str, list[float]]:
    """Run a sweep, and an array written by hand that does the same, until the last trial did its work."""
    values = write_sweep(ENDED)
    Path("array.sh").write_text(ARRAY % (ENDED - 1, values, sys.executable))
    Path("train.py").write_text(TRAIN)
    found: dict[str, list[float]] = {"dtslurm": [], "array": []}
    for _ in range(ROUNDS - 1):
        for name, command in (
            ("array", ("sbatch", "array.sh")),
            ("dtslurm", (sys.executable, "-m", "dtslurm", "submit", "job.yaml")),
        ):
            Path("done").mkdir()
            begin = time.perf_counter()
            ran(*command)
            while len(list(Path("done").iterdir())) < ENDED:
                time.sleep(0.05)
            found[name].append(time.perf_counter() - begin)
            shutil.rmtree("done")
            idle()
    return found


def idle() -> None:
    """Wait until no job is left in the queue."""
    while subprocess.run(["squeue", "--noheader"], check=True, capture_output=True).stdout:
        time.sleep(0.5)


def executors() -> dict[str, Callable[[str], Any]]:
    """Return what makes an executor in a folder, by name."""
    import submitit

    import dtslurm

    logging.getLogger("submitit").setLevel(logging.WARNING)  # it sets its own when it is imported

    def ours(folder: str) -> Any:
        made = dtslurm.Executor(folder, profile="slurm")
        made.update_parameters(time=5, python=sys.executable)
        return made

    def theirs(folder: str) -> Any:
        made = submitit.SlurmExecutor(folder)
        made.update_parameters(time=5)
        return made

    return {"dtslurm": ours, "submitit": theirs}


def functions(calls: Callable[[], dict[str, int]]) -> dict[str, list[dict[str, Any]]]:
    """Run functions as one array until the last result is here."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(ROUNDS - 1):
        for name, make in executors().items():
            executor = make(f"map-{name}-{number}")
            calls()
            begin = time.perf_counter()
            jobs = executor.map_array(abs, range(FUNCTIONS))
            submitted = time.perf_counter() - begin
            assert [job.result() for job in jobs] == list(range(FUNCTIONS))
            wall = time.perf_counter() - begin
            found.setdefault(name, []).append({"wall_s": wall, "queued_s": submitted, **calls()})
            idle()
    return found


def singles() -> dict[str, list[float]]:
    """Submit one function after the other, in blocks by turns; return seconds of one for each block.

    submitit sleeps 0.2 s between submissions; what it takes without that is told as well.
    """
    made = executors()
    makers = {"dtslurm": made["dtslurm"], "submitit": made["submitit"], "unpaused": made["submitit"]}
    found: dict[str, list[float]] = {name: [] for name in makers}
    ready = {name: make(f"single-{name}") for name, make in makers.items()}
    setattr(ready["unpaused"], "_throttle", lambda: None)  # noqa: B010 - its own name for the pause
    subprocess.run(["scontrol", "update", "partition=main", "state=down"], check=False, capture_output=True)
    for start in range(0, SINGLES, BLOCK):
        for name, executor in ready.items():
            begin = time.perf_counter()
            for number in range(start, start + BLOCK):
                executor.submit(abs, number)
            found[name].append((time.perf_counter() - begin) / BLOCK)
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True)
    subprocess.run(["scontrol", "update", "partition=main", "state=up"], check=False, capture_output=True)
    return found


@contextmanager
def run_slurm() -> Iterator[Callable[[], dict[str, int]]]:
    """Bring up a Slurm, and work in a user's folder beside it; yield what counts the calls, as `counting`."""
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
        with counting(folder / "bin") as calls:
            yield calls


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Bring up a Slurm and measure in it."""
    with run_slurm() as calls:
        Path("train.py").write_text("print(1)\n")
        parts: dict[str, Callable[[], Any]] = {
            "trials": lambda: trials(calls),
            "singles": singles,
            "functions": lambda: functions(calls),
            "ended": ended,
        }
        return {part: work() for part, work in parts.items() if not names or part in names}


def spread(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return how the medians compare."""
    return f"{statistics.median(ours) / statistics.median(theirs):.2f} x"


def main() -> None:
    """Measure and print."""
    found = measure([word for word in sys.argv[1:] if not word.startswith("-")])
    if "--json" in sys.argv[1:]:
        print(json.dumps(found))
        return
    if "trials" in found:
        show_trials(found["trials"])
    if "singles" in found:
        one = found["singles"]
        print(
            f"one submission, of {SINGLES}: {spread(one['dtslurm'])}; submitit {spread(one['submitit'])}:",
            end=" ",
        )
        print(ratio(one["dtslurm"], one["submitit"]))
        print(f"  without its pause {spread(one['unpaused'])}: {ratio(one['dtslurm'], one['unpaused'])}")
    if "functions" in found:
        show_functions(found["functions"])
    if "ended" in found:
        ran = found["ended"]
        print(f"{ENDED} trials until the last has done its work: {spread(ran['dtslurm'])}")
        print(f"  an array by hand {spread(ran['array'])}: {ratio(ran['dtslurm'], ran['array'])}")


def show_trials(found: dict[str, Any]) -> None:
    """Print what 1,000 trials cost."""
    seconds, requests = found["seconds"], found["requests"]
    print(f"{TRIALS} trials: {found['sbatch']['queueing']} array queued by one sbatch")
    for name, words in (
        ("ours", "first of a process"),
        ("again", "the same again"),
        ("command", "as a command"),
    ):
        print(f"  {words} {spread(seconds[name])}: {ratio(seconds[name], seconds['bare'])}", end="")
        print(f", {requests[name]} requests to the controller" if name in requests else "")
    print(f"  bare sbatch --array {spread(seconds['bare'])}, {requests['bare']} requests")


def show_functions(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print what a map of functions costs."""
    wall = {name: [one["wall_s"] for one in rounds] for name, rounds in found.items()}
    asks = {name: max(one["squeue"] + one["sacct"] for one in rounds) for name, rounds in found.items()}
    print(
        f"map_array of {FUNCTIONS}: {spread(wall['dtslurm'])}; submitit {spread(wall['submitit'])}:", end=" "
    )
    print(ratio(wall["dtslurm"], wall["submitit"]))
    print(f"  squeue and sacct calls: at most {asks['dtslurm']}; submitit {asks['submitit']}")


if __name__ == "__main__":
    main()
