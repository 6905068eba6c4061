"""The cost of the supervisor: its CPU time, and the slowdown of training with it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.lab.cluster import SlurmLab

TRAIN = Path(__file__).with_name("recovery_train.py")
TIMEOUT_S = 90.0
ROUNDS, WINDOW_S = 40, 0.5
PAIRS, STEPS = 6, 700  # jobs of each kind, and steps of about 5 ms in each job
Submit = Callable[[SlurmLab, Path, list[str], list[str]], str]
Batch = Callable[[SlurmLab, Path, str], None]


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a JSON-lines file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(("]", "}"))]


def wait_until(condition: Callable[[], object], timeout: float) -> bool:
    """Wait until a condition is true; return False if it is not true within the timeout in seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def measure_supervisor(lab: SlurmLab, top: Path, submit: Submit) -> list[dict[str, Any]]:
    """Return the CPU time of the supervisor and its agent, and the slowdown of a rank that computes.

    The processes are stopped and continued alternately, and the steps of the same rank are compared.
    """
    cancel_all_jobs(lab)
    folder = top / "cost"
    folder.mkdir()
    seconds = ROUNDS * 2 * WINDOW_S + 15
    submit(lab, folder, ["-N1", "-l", "srun", "--max-restarts", "3"], ["compute", str(folder), str(seconds)])
    wait_until(lambda: len(read_rows(folder / "costs.jsonl")) > 100, TIMEOUT_S)
    time.sleep(3.0)
    pids = find_processes(lambda words: words[1].startswith(str(folder)) and words[1].endswith("/supervisor"))
    rank_pids = find_processes(
        lambda words: "compute" in words and str(folder) in words and words[1] == "train.py"
    )
    with suppress(PermissionError):  # other processes of this machine must not disturb the comparison
        for pid in [*pids, *rank_pids]:
            os.setpriority(os.PRIO_PROCESS, pid, -20)
    ratios: dict[str, list[float]] = {"CPU": [], "wall": []}
    cpu_used = wall_time = 0.0
    for number in range(ROUNDS):
        steps = {}
        for stopped in (True, False) if number % 2 else (False, True):
            cpu_before, start = cpu_seconds(pids), time.monotonic()
            steps[stopped] = measure_window(folder, pids, stopped=stopped)
            if not stopped:
                cpu_used += cpu_seconds(pids) - cpu_before
                wall_time += time.monotonic() - start
        for clock, values in ratios.items():
            values.append(steps[False][clock] / steps[True][clock])
    row: dict[str, Any] = {"supervisor CPU, % of a core": round(100 * cpu_used / wall_time, 2)}
    for clock, values in ratios.items():
        row[f"{clock} time of a step, running / stopped"] = describe_quartiles(values)
    return [row]


def cancel_all_jobs(lab: SlurmLab) -> None:
    """Cancel all jobs, and wait until none is left."""
    lab.run(["scancel", "--me"])
    wait_until(lambda: not lab.run(["squeue", "-h", "-t", "R,PD,CF"]).stdout.strip(), TIMEOUT_S)


def describe_quartiles(ratios: list[float]) -> str:
    """Return the median, the quartiles and the number of ratios in words."""
    quartiles = statistics.quantiles(ratios)
    return f"{quartiles[1]:.4f} ({quartiles[0]:.4f} - {quartiles[2]:.4f}, {len(ratios)} pairs)"


def measure_window(folder: Path, pids: list[int], *, stopped: bool) -> dict[str, float]:
    """Return the CPU time and the wall-clock time of a step during the next half second.

    The wall-clock time is a mean, because the processes may delay a few steps only.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
    start = time.time()
    time.sleep(WINDOW_S)
    end = time.time()
    if stopped:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    rows = [row for row in read_rows(folder / "costs.jsonl") if start < row[0] - row[2] and row[0] < end]
    return {
        "CPU": statistics.median(row[1] for row in rows),
        "wall": statistics.fmean(row[2] for row in rows),
    }


def find_processes(matches: Callable[[list[str]], bool]) -> list[int]:
    """Return the ids of the processes whose command line matches."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if len(words) > 1 and matches(words):
                pids.append(int(entry.name))
    return pids


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of processes, including their ended children."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(value) for values in fields for value in values[11:15]) / os.sysconf("SC_CLK_TCK")


def compare_jobs(lab: SlurmLab, top: Path, submit: Submit, submit_batch: Batch) -> list[dict[str, Any]]:
    """Return the wall-clock time of jobs with the supervisor and of bare scripts, and their ratio.

    The jobs run alternately, and no two jobs run at the same time.
    """
    cancel_all_jobs(lab)
    seconds_by_kind: dict[bool, list[float]] = {True: [], False: []}
    for number in range(PAIRS):
        for supervised in (True, False) if number % 2 else (False, True):
            folder = top / f"slowdown-{number}-{supervised}"
            folder.mkdir()
            arguments = ["steps", str(folder), str(STEPS)]
            if supervised:
                submit(lab, folder, ["-N1", "-l", "srun", "--max-restarts", "3"], arguments)
            else:
                submit_batch(
                    lab, folder, f"srun -N1 -n1 {shlex.join([sys.executable, str(TRAIN), *arguments])}"
                )
            if not wait_until((folder / "duration").exists, TIMEOUT_S):
                sys.exit(f"{folder.name}: the job did not end\n{lab.tail()}")
            seconds_by_kind[supervised].append(float((folder / "duration").read_text()))
            cancel_all_jobs(lab)
    kinds = zip(seconds_by_kind[True], seconds_by_kind[False], strict=True)
    pairs = [supervised_s / bare_s for supervised_s, bare_s in kinds]
    rows: list[dict[str, Any]] = [
        {
            "job": "with supervisor" if supervised else "bare script",
            "wall-clock s, median": round(statistics.median(seconds), 3),
            "range": f"{min(seconds):.3f} - {max(seconds):.3f}",
            "ratio": "",
        }
        for supervised, seconds in seconds_by_kind.items()
    ]
    ratio = rows[0]["wall-clock s, median"] / rows[1]["wall-clock s, median"]
    rows[0]["ratio"] = f"{ratio:.4f}; by pairs {describe_quartiles(pairs)}"
    return rows
