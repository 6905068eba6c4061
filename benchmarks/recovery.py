"""How long training stands still after a fault, beside the usual ways to go on; what the supervisor costs.

``python -m benchmarks.recovery [--json]`` makes both faults for real on a Slurm of 24 nodes on this machine,
for all ways at the same time: a rank killed by SIGKILL, and a node lost with all that runs on it. A ratio is
the time of a way over that of `dtslurm submit --spare-nodes 1`. Slurm's own floors are those of the test's
cluster: a node is down after some 10 s, a requeued job starts after 6 s (300 s and 121 s where a site changed
nothing). Then, by the wall's clock, how a rank computes in a job with the supervisor and in a bare script.
It takes less than four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.logs import table
from benchmarks.recovery_cost import cost, rows_of, slowdown, until
from tests.lab.cluster import SlurmLab
from tests.lab.software import SlurmUnavailable, find

TRAIN = Path(__file__).with_name("recovery_train.py")
FAULTS = ("rank killed", "node lost")
PATIENCE_S = 90.0
TORCHRUN = (
    "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=1 --max-restarts=3 "
    "--rdzv-endpoint=$(scontrol show hostnames | head -n 1):"
)


def dtslurm(lab: SlurmLab, place: Path, words: list[str], port: int) -> None:
    """Submit with the supervisor and a spare node."""
    del port
    options = ["-N2", "-l", "srun", "--spare-nodes", "1", "--max-restarts", "3", "--sbatch=--exclusive"]
    submit(lab, place, options, words)


def submit(lab: SlurmLab, place: Path, options: list[str], words: list[str]) -> str:
    """Submit by the command line and return the job's id."""
    shutil.copy(TRAIN, place / "train.py")
    argv = [sys.executable, "-m", "dtslurm", "submit", "--cluster", "slurm", "--parsable", "-t", "10"]
    argv += [*options, "--python", sys.executable, "--no-snapshot", "train.py", *words]
    return lab.run(argv, cwd=place, env={"DTSLURM_RUN_ROOT": str(place / "runs")}).stdout.strip()


def requeue(lab: SlurmLab, place: Path, words: list[str], port: int) -> None:
    """Submit a script that trusts `sbatch --requeue`."""
    del port
    batch(lab, place, f"srun --kill-on-bad-exit=1 {shlex.join([sys.executable, str(TRAIN), *words])}")


def torchrun(lab: SlurmLab, place: Path, words: list[str], port: int) -> None:
    """Submit a script that trusts torchrun's own restarts, and `--requeue`."""
    agent = f"{sys.executable} -m torch.distributed.run {TORCHRUN}{port}"
    batch(lab, place, f"srun {agent} {shlex.join([str(TRAIN), *words])}")


def batch(lab: SlurmLab, place: Path, line: str) -> None:
    """Submit one line on two nodes."""
    argv = [
        "sbatch",
        "--parsable",
        "-N2",
        "--ntasks-per-node=1",
        "--requeue",
        "--exclusive",
        "--open-mode=append",
    ]
    lab.run([*argv, "-o", str(place / "batch.log"), "--wrap", line])


class Task:
    """What submitit starts in each task; it may be started again."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self) -> None:
        """Train."""
        from benchmarks.recovery_train import main as train

        train(*self.words)

    def checkpoint(self) -> Any:
        """Return what is to be submitted when the job was preempted or timed out."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Task(self.words))


def submitit(lab: SlurmLab, place: Path, words: list[str], port: int) -> None:
    """Submit by submitit, whose task has a checkpoint method."""
    from submitit import SlurmExecutor

    del lab, port
    executor = SlurmExecutor(folder=place / "submitit", max_num_timeout=3)
    more = {"exclusive": True, "additional_parameters": {"requeue": True}}
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=10, **more)
    executor.submit(Task(words))


WAYS: dict[str, Callable[[SlurmLab, Path, list[str], int], None]] = {
    "dtslurm": dtslurm,
    "torchrun --max-restarts": torchrun,
    "submitit": submitit,
    "sbatch --requeue": requeue,
}


def back(place: Path) -> float | None:
    """Return when a later start than the first made a step, None if none did yet."""
    rows = rows_of(place / "steps.jsonl")
    later = [row for row in rows if row["start"] != rows[0]["start"]]
    return float(later[0]["time"]) if later else None


def noticed(place: Path) -> float | None:
    """Return when the supervisor took note of the fault."""
    for path in place.glob("runs/*/events.jsonl"):
        for row in rows_of(path):
            if row["event"] == "attempt_ended":
                return float(row["time"])
    return None


def recoveries(lab: SlurmLab, top: Path) -> list[dict[str, Any]]:
    """Return how long each way stood still after each fault."""
    places = {(fault, way): top / f"{way}-{fault}".replace(" ", "-") for fault in FAULTS for way in WAYS}
    for number, ((fault, way), place) in enumerate(places.items()):
        place.mkdir()
        WAYS[way](lab, place, [fault, str(place)], lab.layout.port * 2 % 20000 + 20000 + number)
    at: dict[tuple[str, str], float] = {}
    for key, place in places.items():
        if not until((place / "fault").exists, PATIENCE_S):
            sys.exit(f"{key}: it did not come to its fault\n{lab.tail()}")
        at[key] = float((place / "fault").read_text())
        if key[0] == "node lost":
            time.sleep(3.0)  # for signs of life to be there
            at[key] = time.time()
            lab.kill_node((place / "node-1").read_text())
    rows: list[dict[str, Any]] = []
    for key, place in places.items():
        until(lambda place=place: back(place), PATIENCE_S - (time.time() - at[key]))  # type: ignore[misc]
        again, seen = back(place), noticed(place)
        rows.append(
            {
                "fault": key[0],
                "way": key[1],
                "noticed s": round(seen - at[key], 1) if seen else None,
                "trains again s": round(again - at[key], 1) if again else None,
                "then": "" if again else f"not within {PATIENCE_S:.0f} s: {state(lab, place)}",
            }
        )
    ours = {row["fault"]: row["trains again s"] for row in rows if row["way"] == "dtslurm"}
    for row in rows:
        known = row["trains again s"] and ours[row["fault"]]
        row["ratio"] = round(row["trains again s"] / ours[row["fault"]], 1) if known else None
    return rows


def state(lab: SlurmLab, place: Path) -> str:
    """Return what Slurm says of the job that works in a folder."""
    text = lab.run(["scontrol", "show", "job", "-o"]).stdout
    lines = [line for line in text.splitlines() if f"{place}/" in line]
    return (
        next((word[9:] for word in lines[-1].split() if word.startswith("JobState=")), "?") if lines else "?"
    )


MEASURES: dict[str, Callable[[SlurmLab, Path], list[dict[str, Any]]]] = {
    "recovery": recoveries,
    "cost": lambda lab, top: cost(lab, top, submit),
    "slowdown": lambda lab, top: slowdown(lab, top, submit, batch),
}


def main() -> None:
    """Print the tables, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["recovery", "cost", "slowdown"])
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    top = Path(tempfile.mkdtemp(prefix="dtslurm-recovery-"))
    results: dict[str, Any] = {"schema": 1}
    try:
        software = find(accounting=False)
    except SlurmUnavailable as error:
        sys.exit(f"no Slurm here: {error}")
    try:
        with SlurmLab(root, nodes=24, gpus=0, software=software) as lab:
            repository = str(Path(__file__).parents[1])
            os.environ.update(lab.env, PYTHONPATH=repository)  # for submitit, which asks the environment
            for name, measure in MEASURES.items():
                if chosen.only in (None, name):
                    results[name] = measure(lab, top)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(top, ignore_errors=True)
    if chosen.json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
        return
    for name in MEASURES:
        if name in results:
            table(results[name])


if __name__ == "__main__":
    main()
