"""The time until training continues after a fault, beside other methods, and the cost of the supervisor.

The benchmark starts a Slurm with 24 nodes on this machine and injects two faults into jobs of all methods at
the same time: it kills a rank with SIGKILL, and it removes a node with all its processes. The methods are
`dtslurm submit --spare-nodes 1`, torchrun with `--max-restarts`, submitit with a checkpoint method, and
`sbatch --requeue`. The training script loads no library, so that its own start time does not count. A ratio
is the time of a method divided by the time of dtslurm. The limits of Slurm are shorter than usual: this Slurm
declares a node down after about 10 s and starts a requeued job after 6 s, while the defaults are 300 s and
121 s.

The second table shows the CPU time of the supervisor, and the time of a training step with the supervisor and
its agent running, divided by the time while both are stopped; the quartiles of 40 pairs are in parentheses.
The third table shows the wall-clock time of jobs with the supervisor and of bare scripts, which run
alternately.

Run it with ``python -m benchmarks.recovery [--only PART] [--json]``. It takes less than four minutes.
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

from benchmarks.logs import print_table
from benchmarks.recovery_cost import compare_jobs, measure_supervisor, read_rows, wait_until
from tests.lab.cluster import SlurmLab
from tests.lab.software import SlurmUnavailable, find

TRAIN = Path(__file__).with_name("recovery_train.py")
FAULTS = ("rank killed", "node lost")
TIMEOUT_S = 90.0
TORCHRUN = (
    "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=1 --max-restarts=3 "
    "--rdzv-endpoint=$(scontrol show hostnames | head -n 1):"
)


def submit_with_dtslurm(lab: SlurmLab, folder: Path, arguments: list[str], port: int) -> None:
    """Submit with the supervisor and a spare node."""
    del port
    options = ["-N2", "-l", "srun", "--spare-nodes", "1", "--max-restarts", "3", "--sbatch=--exclusive"]
    submit(lab, folder, options, arguments)


def submit(lab: SlurmLab, folder: Path, options: list[str], arguments: list[str]) -> str:
    """Run `dtslurm submit` and return the job id."""
    shutil.copy(TRAIN, folder / "train.py")
    argv = [sys.executable, "-m", "dtslurm", "submit", "--cluster", "slurm", "--parsable", "-t", "10"]
    argv += [*options, "--python", sys.executable, "--no-snapshot", "train.py", *arguments]
    return lab.run(argv, cwd=folder, env={"DTSLURM_RUN_ROOT": str(folder / "runs")}).stdout.strip()


def submit_with_requeue(lab: SlurmLab, folder: Path, arguments: list[str], port: int) -> None:
    """Submit a script that relies on `sbatch --requeue`."""
    del port
    submit_batch(
        lab, folder, f"srun --kill-on-bad-exit=1 {shlex.join([sys.executable, str(TRAIN), *arguments])}"
    )


def submit_with_torchrun(lab: SlurmLab, folder: Path, arguments: list[str], port: int) -> None:
    """Submit a script that relies on the restarts of torchrun and on `--requeue`."""
    agent = f"{sys.executable} -m torch.distributed.run {TORCHRUN}{port}"
    submit_batch(lab, folder, f"srun {agent} {shlex.join([str(TRAIN), *arguments])}")


def submit_batch(lab: SlurmLab, folder: Path, line: str) -> None:
    """Submit a command line as a job on two nodes."""
    argv = [
        "sbatch",
        "--parsable",
        "-N2",
        "--ntasks-per-node=1",
        "--requeue",
        "--exclusive",
        "--open-mode=append",
    ]
    lab.run([*argv, "-o", str(folder / "batch.log"), "--wrap", line])


class CheckpointedTask:
    """The callable that submitit starts in each task, and starts again from its checkpoint method."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        """Train."""
        from benchmarks.recovery_train import main as train

        train(*self.arguments)

    def checkpoint(self) -> Any:
        """Return the submission that submitit makes after a preemption or a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(CheckpointedTask(self.arguments))


def submit_with_submitit(lab: SlurmLab, folder: Path, arguments: list[str], port: int) -> None:
    """Submit with submitit a task that has a checkpoint method."""
    from submitit import SlurmExecutor

    del lab, port
    executor = SlurmExecutor(folder=folder / "submitit", max_num_timeout=3)
    options: dict[str, Any] = {"exclusive": True, "additional_parameters": {"requeue": True}}
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=10, **options)
    executor.submit(CheckpointedTask(arguments))


METHODS: dict[str, Callable[[SlurmLab, Path, list[str], int], None]] = {
    "dtslurm": submit_with_dtslurm,
    "torchrun --max-restarts": submit_with_torchrun,
    "submitit": submit_with_submitit,
    "sbatch --requeue": submit_with_requeue,
}


def read_resume_time(folder: Path) -> float | None:
    """Return the time of the first step after a restart, or None if there is none yet."""
    rows = read_rows(folder / "steps.jsonl")
    restarted = [row for row in rows if row["start"] != rows[0]["start"]]
    return float(restarted[0]["time"]) if restarted else None


def read_detection_time(folder: Path) -> float | None:
    """Return the time at which the supervisor recorded the end of the first attempt, or None."""
    for path in folder.glob("runs/*/events.jsonl"):
        for row in read_rows(path):
            if row["event"] == "attempt_ended":
                return float(row["time"])
    return None


def measure_recovery(lab: SlurmLab, top: Path) -> list[dict[str, Any]]:
    """Return the seconds until each method detects each fault and until its training continues."""
    folders = {
        (fault, method): top / f"{method}-{fault}".replace(" ", "-") for fault in FAULTS for method in METHODS
    }
    for number, ((fault, method), folder) in enumerate(folders.items()):
        folder.mkdir()
        port = lab.layout.port * 2 % 20000 + 20000 + number
        METHODS[method](lab, folder, [fault, str(folder)], port)
    fault_times: dict[tuple[str, str], float] = {}
    for key, folder in folders.items():
        if not wait_until((folder / "fault").exists, TIMEOUT_S):
            sys.exit(f"{key}: the training did not reach the step of its fault\n{lab.tail()}")
        fault_times[key] = float((folder / "fault").read_text())
        if key[0] == "node lost":
            time.sleep(3.0)  # until heartbeats exist
            fault_times[key] = time.time()
            lab.kill_node((folder / "node-1").read_text())
    rows: list[dict[str, Any]] = []
    for key, folder in folders.items():
        remaining = TIMEOUT_S - (time.time() - fault_times[key])
        wait_until(lambda folder=folder: read_resume_time(folder), remaining)  # type: ignore[misc]
        resumed, detected = read_resume_time(folder), read_detection_time(folder)
        rows.append(
            {
                "fault": key[0],
                "method": key[1],
                "detected after s": round(detected - fault_times[key], 1) if detected else None,
                "resumed after s": round(resumed - fault_times[key], 1) if resumed else None,
                "remark": "" if resumed else f"not within {TIMEOUT_S:.0f} s: {job_state(lab, folder)}",
            }
        )
    references = {row["fault"]: row["resumed after s"] for row in rows if row["method"] == "dtslurm"}
    for row in rows:
        seconds, reference = row["resumed after s"], references[row["fault"]]
        row["ratio"] = round(seconds / reference, 1) if seconds and reference else None
    return rows


def job_state(lab: SlurmLab, folder: Path) -> str:
    """Return the state in Slurm of the job that works in a folder."""
    text = lab.run(["scontrol", "show", "job", "-o"]).stdout
    lines = [line for line in text.splitlines() if f"{folder}/" in line]
    words = lines[-1].split() if lines else []
    return next((word[9:] for word in words if word.startswith("JobState=")), "?")


MEASURES: dict[str, Callable[[SlurmLab, Path], list[dict[str, Any]]]] = {
    "recovery": measure_recovery,
    "cost": lambda lab, top: measure_supervisor(lab, top, submit),
    "slowdown": lambda lab, top: compare_jobs(lab, top, submit, submit_batch),
}


def main() -> None:
    """Print the tables, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["recovery", "cost", "slowdown"])
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    top = Path(tempfile.mkdtemp(prefix="dtslurm-recovery-"))
    results: dict[str, Any] = {"schema": 1}
    try:
        software = find(accounting=False)
    except SlurmUnavailable as error:
        sys.exit(f"cannot start a Slurm: {error}")
    try:
        with SlurmLab(root, nodes=24, gpus=0, software=software) as lab:
            repository = str(Path(__file__).parents[1])
            os.environ.update(
                lab.env, PYTHONPATH=repository
            )  # for submitit, which reads this process's environment
            for name, measure in MEASURES.items():
                if arguments.only in (None, name):
                    results[name] = measure(lab, top)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(top, ignore_errors=True)
    if arguments.json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
        return
    for name in MEASURES:
        if name in results:
            print_table(results[name])


if __name__ == "__main__":
    main()
