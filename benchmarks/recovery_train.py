"""What `benchmarks.recovery` trains: steps of 50 ms that all ranks make together, saved every ten steps.

No library is loaded, so that what is measured is the way back and not the start of the training code. It runs
under every launcher: where it stands, it reads from the environment.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY, FAULT_AT = 400, 10, 30


def number(*names: str) -> int:
    """Return the first of these variables that is set, as a number."""
    return next(int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit())


def put(path: Path, text: str) -> None:
    """Write a file whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def mark_of(path: Path) -> tuple[int, float]:
    """Return where a rank is, and when it said so."""
    try:
        step, when = path.read_text().split()
    except OSError:
        return -1, 0.0
    return int(step), float(when)


def main(fault: str, place: str) -> None:
    """Train; once, at a step, rank 1 is killed, or waits for the loss of its node."""
    folder = Path(place)
    rank, world = number("RANK", "SLURM_PROCID"), number("WORLD_SIZE", "SLURM_NTASKS")
    began = time.time()
    put(folder / f"node-{rank}", os.environ["SLURMD_NODENAME"])
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    while step < STEPS:
        if rank == 1 and step == FAULT_AT and fault != "none" and not (folder / "fault").exists():
            put(folder / "fault", str(time.time()))
            if fault == "rank killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        time.sleep(0.05)
        while True:  # marks are made anew all the time: those of an earlier start do not count
            put(folder / f"at-{rank}", f"{step} {time.time()}")
            marks = [mark_of(folder / f"at-{other}") for other in range(world)]
            if all(at >= step and when >= began for at, when in marks):
                break
            time.sleep(0.01)
        step += 1
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "start": began, "step": step}) + "\n")
            if step % EVERY == 0:
                put(saved, str(step))


def compute(place: str, seconds: float) -> None:
    """Compute without pause, and note how much time each step took, by the CPU and by the wall.

    What others take of the core is theirs to tell; what they cost by caches and shared cores is in it.
    """
    with (Path(place) / "costs.jsonl").open("a") as file:
        end = time.time() + seconds
        while time.time() < end:
            begin, moment = time.process_time(), time.perf_counter()
            sum(i * i for i in range(100_000))
            took, passed = time.process_time() - begin, time.perf_counter() - moment
            file.write(f"[{time.time()}, {took}, {passed}]\n")
            file.flush()


def steps(place: str, count: int) -> None:
    """Compute so many steps, after some to become warm, and note the wall time that they took together."""
    for _ in range(100):
        sum(i * i for i in range(100_000))
    began = time.perf_counter()
    for _ in range(count):
        sum(i * i for i in range(100_000))
    put(Path(place) / "took", str(time.perf_counter() - began))


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "compute":
        compute(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2])
