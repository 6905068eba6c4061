"""Data-parallel training that takes its place from the environment and goes on from its last checkpoint.

The gradients are averaged and applied by hand: DistributedDataParallel and torch.optim would import torch's
compiler, which doubles what a process costs.

FAULT=node: once, the second node ends with all its processes at step 5.
FAULT=codes: rank 3 ends with 42 at step 5, once; from then on rank 1 with 7.
FAULT=wait: the first world stays at step 5 until a node is lost.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import distributed as dist

STEPS = 30
folder = Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
state, worlds, once = folder / "state.pt", folder / "worlds", folder / "once"
again = once.exists()
kind = os.environ["FAULT"]


def fault() -> None:
    rank = dist.get_rank()
    if kind == "codes" and rank == (1 if again else 3):
        once.touch()
        os._exit(7 if again else 42)
    if kind == "node" and not again and os.environ["SLURM_NODEID"] == "1":
        if os.environ["LOCAL_RANK"] == "1":
            time.sleep(300)
        once.touch()
        agent = next(item for item in psutil.Process().parents() if "--nproc-per-node=2" in item.cmdline())
        for process in [agent, *agent.children(recursive=True)]:
            if process.pid != os.getpid():
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "wait" and not again:
        once.touch()
        print("waiting", flush=True)
        time.sleep(1)  # and go on at the same step, until a peer is gone


def wait_for_failure_record() -> None:
    """Wait until the rank that ended with a code of its own is recorded, so that this is not the first."""
    records = Path(os.environ["DTSLURM_RUN_DIR"], "ranks", os.environ["DTSLURM_ATTEMPT"])
    end = time.monotonic() + 60
    while kind == "codes" and not list(records.glob("*.failure")) and time.monotonic() < end:
        time.sleep(0.05)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
first = 0
if state.exists():
    saved = torch.load(state)
    first = saved["step"] + 1
    net.load_state_dict(saved["net"])
if dist.get_rank() == 0:
    with worlds.open("a") as file:
        file.write(f"{dist.get_world_size()}\n")
dist.barrier()
print(f"world of {dist.get_world_size()} from step {first}", flush=True)
step = first
while step < STEPS:
    if step >= 5:
        fault()
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 4 + dist.get_rank()))
    net.zero_grad()
    try:
        loss = torch.nn.functional.mse_loss(net(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
    except RuntimeError:  # a peer has failed
        wait_for_failure_record()
        raise
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(parameter.grad, alpha=0.1 / dist.get_world_size())
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if dist.get_rank() == 0:
        torch.save({"step": step, "net": net.state_dict()}, state.with_suffix(".new"))
        state.with_suffix(".new").replace(state)
    if not (kind == "wait" and not again and step == 5):
        step += 1
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that winds down under load
