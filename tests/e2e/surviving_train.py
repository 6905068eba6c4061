"""Deterministic training without libraries; all ranks keep step by files.

FAULT=KIND@STEP[@RANK]: once in a run, at that step, that rank (1) does something bad; of "spin", all stand
still and that one computes. Ends with 85 when it hears the early signal or TERM, having saved. Rank 0 leaves
the final weights in ``final.json``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY = int(os.environ.get("STEPS", "40")), int(os.environ.get("EVERY", "5"))
PACE = float(os.environ.get("PACE", "0.05"))
run, attempt = Path(os.environ["DTSLURM_RUN_DIR"]), int(os.environ["DTSLURM_ATTEMPT"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind, at, who = (*os.environ.get("FAULT", "none@0").split("@"), "1")[:3]
folder = Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
marks = run / "marks" / str(attempt)
marks.mkdir(parents=True, exist_ok=True)
told: list[int] = []


def put(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def fault(step: int) -> bool:
    """Do what was asked for; return whether to be slow from now on."""
    once = run / "fault"
    if kind == "spin" and step == int(at) and attempt == 0:
        put(once, str(time.time()))
        while sum(range(200_000 if rank == int(who) else 1)) >= 0:  # at one place, in the eyes of who looks
            time.sleep(0.004 if rank == int(who) else 600)
    if kind == "none" or step != int(at) or rank != int(who) or once.exists():
        return False
    put(once, str(time.time()))
    if kind.startswith("signal"):
        os.kill(os.getpid(), int(kind[len("signal") :]))
    elif kind.startswith("exit"):
        os._exit(int(kind[len("exit") :]))
    elif kind == "gpu":
        sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    elif kind == "error":
        raise ValueError("a mistake in the code")
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind in ("hang", "wait"):
        time.sleep(600)
    return kind == "slow"


def in_step(step: int, word: str) -> str:
    """Wait for all ranks; return rank 0's word."""
    put(marks / str(rank), f"{step} {word}")
    while True:
        seen = []
        for other in range(world):
            try:
                seen.append((marks / str(other)).read_text().split())
            except OSError:
                break
        if len(seen) == world and all(int(item[0]) >= step for item in seen):
            return seen[0][1] if int(seen[0][0]) == step else "go"
        time.sleep(0.02)


def save(step: int, weights: list[int]) -> None:
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / "state.json", json.dumps({"step": step, "weights": weights}))


if os.environ.get("DEAF") != "yes":
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
slow = False
step, weights = 0, [1, 2, 3, 5, 8]
if (folder / "state.json").exists():
    state = json.loads((folder / "state.json").read_text())
    step, weights = state["step"], state["weights"]
print(f"begin at {step} on {os.environ.get('SLURMD_NODENAME')}", flush=True)
while step < STEPS:
    slow = fault(step) or slow
    time.sleep(8.0 if slow else PACE)
    word = in_step(step, "leave" if told else "go")
    weights = [(item * 6364136223846793005 + step + place) % 2**61 for place, item in enumerate(weights)]
    step += 1
    if rank == 0:
        with Path(os.environ["DTSLURM_METRICS"]).open("a") as file:
            print(json.dumps({"time": time.time(), "step": step, "loss": 1 / step}), file=file)
    print("step", step, flush=True)
    if step % EVERY == 0 or word == "leave":
        save(step, weights)
    if word == "leave":
        print("saved", flush=True)
        sys.exit(85)
if rank == 0:
    put(run / "final.json", json.dumps(weights))
