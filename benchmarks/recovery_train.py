"""The training script of `benchmarks.recovery`: synchronized steps of 50 ms, a checkpoint every ten.

It imports no library, so that the benchmark measures the recovery and not the start of the training code. It
reads its rank and the world size from the environment, so that it runs under every launcher.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY, FAULT_AT = 400, 10, 30


def read_number(*names: str) -> int:
    """Return the value of the first of these variables that is a number."""
    return next(int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit())


def write_atomically(path: Path, text: str) -> None:
    """Write a file through a rename, so that readers never see a part of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def read_progress(path: Path) -> tuple[int, float]:
    """Return the step of a rank and the time at which it was written."""
    try:
        step, when = path.read_text().split()
    except OSError:
        return -1, 0.0
    return int(step), float(when)


def main(fault: str, directory: str) -> None:
    """Train; at one step, rank 1 kills itself once, or waits for the loss of its node."""
    folder = Path(directory)
    rank, world = read_number("RANK", "SLURM_PROCID"), read_number("WORLD_SIZE", "SLURM_NTASKS")
    started = time.time()
    write_atomically(folder / f"node-{rank}", os.environ["SLURMD_NODENAME"])
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    while step < STEPS:
        if rank == 1 and step == FAULT_AT and fault != "none" and not (folder / "fault").exists():
            write_atomically(folder / "fault", str(time.time()))
            if fault == "rank killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        time.sleep(0.05)
        while True:  # write again each time, because files of an earlier start do not count
            write_atomically(folder / f"at-{rank}", f"{step} {time.time()}")
            progress = [read_progress(folder / f"at-{other}") for other in range(world)]
            if all(at >= step and when >= started for at, when in progress):
                break
            time.sleep(0.01)
        step += 1
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "start": started, "step": step}) + "\n")
            if step % EVERY == 0:
                write_atomically(saved, str(step))


def compute(directory: str, seconds: float) -> None:
    """Compute without pause, and write the CPU time and the wall-clock time of each step.

    The CPU time does not include other processes on the core, but includes their effect on shared caches.
    """
    with (Path(directory) / "costs.jsonl").open("a") as file:
        end = time.time() + seconds
        while time.time() < end:
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            sum(i * i for i in range(100_000))
            cpu, wall = time.process_time() - cpu_start, time.perf_counter() - wall_start
            file.write(f"[{time.time()}, {cpu}, {wall}]\n")
            file.flush()


def steps(directory: str, count: int) -> None:
    """Compute this many steps after a warm-up, and write the wall-clock time that they take in total."""
    for _ in range(100):
        sum(i * i for i in range(100_000))
    start = time.perf_counter()
    for _ in range(count):
        sum(i * i for i in range(100_000))
    write_atomically(Path(directory) / "duration", str(time.perf_counter() - start))


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "compute":
        compute(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2])
