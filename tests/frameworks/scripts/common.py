"""What these training scripts share: a tiny problem, faults on demand, an ear for the early signal.

FAULT=exit, kill or launcher makes rank 3 end with 42, die of SIGKILL, or kill its node's launcher.
LISTEN=USR2 makes every rank wait for that signal after training, and say so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import torch

FEATURES = 8
heard: list[str] = []


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, 1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(dim=1, keepdim=True)


def _hear(number: int, frame: FrameType | None) -> None:
    del frame
    heard.append(signal.Signals(number).name)


def listen() -> None:
    """Install the handler; to be called before training."""
    if wanted := os.environ.get("LISTEN"):
        signal.signal(signal.Signals[f"SIG{wanted}"], _hear)


def wait_to_hear() -> None:
    """Wait for the signal, if one was announced."""
    if not os.environ.get("LISTEN"):
        return
    print("listening", flush=True)
    end = time.monotonic() + 300
    while not heard and time.monotonic() < end:
        time.sleep(0.2)
    print(f"heard {heard}", flush=True)


def fault(step: int) -> None:
    """Fail, if this rank was told to and the time has come."""
    kind = os.environ.get("FAULT")
    if not kind or step != 5 or os.environ["RANK"] != "3":
        return
    print(f"fault {kind}", flush=True)
    if kind == "exit":
        os._exit(42)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"/proc/{os.getppid()}/stat", encoding="ascii") as stat:  # noqa: PTH123
        launcher = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGKILL)
    time.sleep(300)
    sys.exit("nobody ended this rank")


def report(step: int, loss: float) -> None:
    print(f"step {step} loss {loss:.6f}", flush=True)


def end() -> None:
    """End together and at once: gloo's threads may abort an interpreter that winds down under load."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
