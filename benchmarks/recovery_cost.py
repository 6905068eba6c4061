"""What the supervisor costs: its own use of a core, and what training beside it loses."""

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
PATIENCE_S = 90.0
ROUNDS, ROUND_S = 40, 0.5
PAIRS, STEPS = 6, 700  # jobs of each kind, and steps of some 5 ms in each
Submit = Callable[[SlurmLab, Path, list[str], list[str]], str]
Batch = Callable[[SlurmLab, Path, str], None]


def rows_of(path: Path) -> list[Any]:
    """Return the rows of a JSON-lines file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(("]", "}"))]


def until(happened: Callable[[], object], patience: float) -> bool:
    """Wait; return whether it happened."""
    end = time.monotonic() + patience
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def cost(lab: SlurmLab, top: Path, submit: Submit) -> list[dict[str, Any]]:
    """Return the supervisor's use of a core, and how much it slows one computing rank down.

    Supervisor and watcher are stopped and let go on in turn, and steps of the same process compared.
    """
    alone(lab)
    place = top / "cost"
    place.mkdir()
    seconds = ROUNDS * 2 * ROUND_S + 15
    submit(lab, place, ["-N1", "-l", "srun", "--max-restarts", "3"], ["compute", str(place), str(seconds)])
    until(lambda: len(rows_of(place / "costs.jsonl")) > 100, PATIENCE_S)
    time.sleep(3.0)
    pids = processes(lambda words: words[1].startswith(str(place)) and words[1].endswith("/supervisor"))
    rank = processes(lambda words: "compute" in words and str(place) in words and words[1] == "train.py")
    with suppress(PermissionError):  # between themselves alone, whatever else this machine does
        for pid in [*pids, *rank]:
            os.setpriority(os.PRIO_PROCESS, pid, -20)
    ratios: dict[str, list[float]] = {"CPU": [], "wall": []}
    used = wall = 0.0
    for number in range(ROUNDS):
        steps = {}
        for stopped in (True, False) if number % 2 else (False, True):
            before, began = cpu_of(pids), time.monotonic()
            steps[stopped] = window(place, pids, stopped=stopped)
            if not stopped:
                used, wall = used + cpu_of(pids) - before, wall + time.monotonic() - began
        for clock, of in ratios.items():
            of.append(steps[False][clock] / steps[True][clock])
    found: dict[str, Any] = {"supervisor and watcher, % of a core": round(100 * used / wall, 2)}
    for clock, of in ratios.items():
        found[f"{clock} time of a step with them / stopped"] = spread(of)
    return [found]


def alone(lab: SlurmLab) -> None:
    """End what still runs there, and return when nothing does."""
    lab.run(["scancel", "--me"])
    until(lambda: not lab.run(["squeue", "-h", "-t", "R,PD,CF"]).stdout.strip(), PATIENCE_S)


def spread(ratios: list[float]) -> str:
    """Return the median, and the middle half of what was measured."""
    quarters = statistics.quantiles(ratios)
    return f"{quarters[1]:.4f} ({quarters[0]:.4f} - {quarters[2]:.4f}, {len(ratios)} pairs)"


def window(place: Path, pids: list[int], *, stopped: bool) -> dict[str, float]:
    """Return what a step of the next moments took, with the processes stopped or not, by both clocks.

    By the wall it is the mean: what the processes take from a few steps belongs to it.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
    begin = time.time()
    time.sleep(ROUND_S)
    end = time.time()
    if stopped:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    rows = [row for row in rows_of(place / "costs.jsonl") if begin < row[0] - row[2] and row[0] < end]
    return {
        "CPU": statistics.median(row[1] for row in rows),
        "wall": statistics.fmean(row[2] for row in rows),
    }


def processes(wanted: Callable[[list[str]], bool]) -> list[int]:
    """Return the processes whose command line is wanted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if len(words) > 1 and wanted(words):
                found.append(int(entry.name))
    return found


def cpu_of(pids: list[int]) -> float:
    """Return the CPU seconds that processes have used, their ended children included."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(value) for one in fields for value in one[11:15]) / os.sysconf("SC_CLK_TCK")


def slowdown(lab: SlurmLab, top: Path, submit: Submit, batch: Batch) -> list[dict[str, Any]]:
    """Return how long a rank's steps take in a job with the supervisor, over a bare script's; job by job.

    The jobs run one after the other, in turn, each alone; each tells the wall time of its own steps.
    """
    alone(lab)
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(PAIRS):
        for supervised in (True, False) if number % 2 else (False, True):
            place = top / f"slowdown-{number}-{supervised}"
            place.mkdir()
            words = ["steps", str(place), str(STEPS)]
            if supervised:
                submit(lab, place, ["-N1", "-l", "srun", "--max-restarts", "3"], words)
            else:
                batch(lab, place, f"srun -N1 -n1 {shlex.join([sys.executable, str(TRAIN), *words])}")
            if not until((place / "took").exists, PATIENCE_S):
                sys.exit(f"{place.name}: it did not end\n{lab.tail()}")
            took[supervised].append(float((place / "took").read_text()))
            alone(lab)
    pairs = [one / other for one, other in zip(took[True], took[False], strict=True)]
    rows: list[dict[str, Any]] = [
        {
            "job": "with supervisor" if supervised else "bare script",
            "wall s, median": round(statistics.median(seconds), 3),
            "least - most": f"{min(seconds):.3f} - {max(seconds):.3f}",
            "ratio": "",
        }
        for supervised, seconds in took.items()
    ]
    rows[0]["ratio"] = (
        f"{rows[0]['wall s, median'] / rows[1]['wall s, median']:.4f}; by pairs {spread(pairs)}"
    )
    return rows
