"""What ranks run in these tests: small trainings whose end can be compared bit for bit, and faults."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtslurm import train
from dtslurm.train import folder as store
from dtslurm.train import session as start

checkpoint_module: Any = sys.modules["dtslurm.train.checkpoint"]
session_module: Any = sys.modules["dtslurm.train.session"]
straggler_module: Any = sys.modules["dtslurm.train.straggler"]


class Squares(torch.utils.data.Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """Numbers whose index can be told from the sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        dice = torch.Generator().manual_seed(index)
        return index, torch.randint(-4, 5, (6,), generator=dice).double()


class PartlyUsed(nn.Sequential):  # type: ignore[misc, unused-ignore]
    """Layers, and a parameter that never gets a gradient."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.never = nn.Parameter(torch.ones(2))


def finish(out: str, model: nn.Module) -> None:
    """Keep the final weights, of all shards together, and say that training is done."""
    values = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(values, Path(out, "final.pt"))


def seen(out: str, epoch: int, step: int, samples: torch.Tensor) -> None:
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("DTSLURM_ATTEMPT", "0")
    with Path(out, f"seen-{rank}.jsonl").open("a") as file:
        line = {"attempt": int(attempt), "epoch": epoch, "step": step, "samples": samples.tolist()}
        file.write(json.dumps(line) + "\n")


def dropout(
    out: str, *, epochs: int = 3, save_every: int = 4, stop_at: int = 0, fault: str = "", **more: Any
) -> None:
    """A net with random numbers and an unused parameter, by DistributedDataParallel, AdamW and a schedule."""
    with start(seed=7, save_every=save_every, **more) as run:
        net = PartlyUsed(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1)).double()
        model = DistributedDataParallel(net.to(run.device), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        loader = train.Loader(Squares(50), 8, seed=3)
        run.restore(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
        for epoch in loader.epochs(epochs):
            for indices, inputs in loader:
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                seen(out, epoch, run.step + 1, indices)
                if fault and run.step + 1 == stop_at:
                    FAULTS[fault](run)
                run.end_step(loss=loss)
        finish(out, net)


def exact(
    out: str, *, epochs: int = 2, steps: int = 0, sharded: bool = False, batch_size: int = 12, **more: Any
) -> None:
    """A model whose every sum is exact in double precision: any number of ranks gives the same bits.

    Data, weights, learning rate and momentum are whole numbers over powers of two, and the loss is linear in
    the weights that learn: those of the second layer.
    """
    with start(seed=7, **more) as run:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4)).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_((parameter * 8).round())
        net[0].requires_grad_(requires_grad=False)
        model: nn.Module = net
        if sharded:
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (run.world_size,))
            for layer in (*net, net):
                fully_shard(layer, mesh=mesh)
        elif run.world_size > 1:
            model = DistributedDataParallel(net)
        parameters = list(net[1].parameters())
        optimizer = torch.optim.SGD(parameters, lr=2**-6, momentum=0.5)
        loader = train.Loader(Squares(48), batch_size, seed=3)
        run.restore(model=model, optimizer=optimizer, loader=loader)
        began = run.step
        for epoch in loader.epochs(epochs):
            for indices, inputs in loader:
                optimizer.zero_grad()
                (model(inputs).sum() * run.world_size).backward()
                optimizer.step()
                seen(out, epoch, run.step + 1, indices)
                run.end_step()
                if steps and run.step == began + steps:
                    run.checkpoint(wait=True)
                    return
        finish(out, net)


def kill(run: train.Session) -> None:
    """Die at once, while a save may be under way."""
    os.kill(os.getpid(), signal.SIGKILL)


def signal_one(run: train.Session) -> None:
    """Let one rank alone be told to leave."""
    if run.rank == int(os.environ["SIGNALLED_RANK"]):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))


def new_attempt(run: train.Session) -> None:
    """Let another attempt take the run over, as a controller does that believes this one dead."""
    if run.rank == 0:
        Path(os.environ["DTSLURM_RUN_DIR"], "attempt").write_text("7\n")
    dist.barrier()


def stale_for_the_tick(run: train.Session) -> None:
    """The same, at a time when no save is due."""
    new_attempt(run)
    run._lease_at = -1e9


FAULTS: dict[str, Callable[[train.Session], None]] = {
    item.__name__: item for item in (kill, signal_one, new_attempt, stale_for_the_tick)
}


def kill_at(folder: str, number: int, rank: int) -> None:
    """Have this process die by SIGKILL just before its ``number``-th change of the checkpoint folder."""
    done = [0]
    events = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"}

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in events or not str(args[0]).startswith(f"{folder}/"):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        done[0] += 1
        log = os.open(f"{folder}-operations-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{done[0]} {event} {args[0]}\n".encode())
        os.close(log)
        if done[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def swept(out: str, *, number: int, victim: int, **more: Any) -> None:
    """`dropout`, but one rank dies at one change of the checkpoint folder."""
    rank = int(os.environ["RANK"])
    if rank == victim:
        kill_at(os.environ["DTSLURM_CHECKPOINT_DIR"], number, rank)
    dropout(out, **more)


def unreadable(out: str, *, victim: int, times: int, patience: float = 60.0, **more: Any) -> None:
    """`dropout`, but one rank fails to read a file of a checkpoint so many times."""
    checkpoint_module.READ_PATIENCE, checkpoint_module._READ_PAUSE = patience, 0.1
    left, checksum = [times], store.checksum

    def read(path: Path, *, sync: bool = False) -> store.CheckpointFile:
        if not sync and left[0] and int(os.environ["RANK"]) == victim:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return checksum(path, sync=sync)

    store.checksum = read
    dropout(out, **more)


def lossy(out: str, *, victim: int, lost: str, emptied: bool = False, **more: Any) -> None:
    """`dropout`, but in the save of step 8 the disk loses or empties a file of the victim's."""
    save, saves = checkpoint_module.dcp.save, [0]

    def save_and_lose(*values: Any, storage_writer: Any, **rest: Any) -> Any:
        written = save(*values, storage_writer=storage_writer, **rest)
        saves[0] += 1
        if saves[0] == 2 and int(os.environ["RANK"]) == victim:
            path = Path(storage_writer.path, lost)
            path.write_bytes(b"") if emptied else path.unlink()
        return written

    checkpoint_module.dcp.save = save_and_lose
    dropout(out, **more)


def overlapping(out: str, **more: Any) -> None:
    """`dropout`, where the save of step 4 cannot end before step 7 has: it must be in the background."""
    released, checksum = threading.Event(), store.checksum
    waited = [False]

    def patient(path: Path, *, sync: bool = False) -> store.CheckpointFile:
        if not waited[0]:
            waited[0] = released.wait(60)
        return checksum(path, sync=sync)

    store.checksum = patient
    end_step = train.Session.end_step

    def stepped(self: train.Session, **metrics: Any) -> bool:
        if self.step + 1 == 7:
            released.set()
        return end_step(self, **metrics)

    train.Session.end_step = stepped  # type: ignore[method-assign]
    dropout(out, **more)
    Path(out, f"waited-{os.environ['RANK']}").write_text(str(waited[0]))


def ordered(out: str) -> None:
    """Save once, and write down what reached the disk in which order."""
    log: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(file: int) -> None:
        log.append("sync " + Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def noted_rename(self: Path, target: Path) -> Path:
        log.append(f"rename {self.name} {Path(target).name}")
        return rename(self, target)

    os.fsync, Path.rename = noted_fsync, noted_rename  # type: ignore[method-assign, assignment]
    train.Checkpointer().save(3, {"net": nn.Linear(2, 2)}, wait=True)
    Path(out, "log.json").write_text(json.dumps(log))


def full(out: str, *, tries: int, numbers: int, **more: Any) -> None:
    """Save a little, then again and again more than the disk holds, then a little."""
    with start(save_minutes=None, **more) as run:
        small, large = torch.ones(10), torch.ones(numbers)
        keeper = run.checkpoints
        keeper.save(1, {"numbers": small}, wait=True)
        for step in range(2, 2 + tries):
            keeper.save(step, {"numbers": large})
        keeper.wait()
        keeper.save(9, {"numbers": small * 2}, wait=True)


def slow_rank(out: str, *, slow: int, steps: int = 40) -> None:
    """A rank that computes longer than the others in each forward pass, by a clock of its own."""
    session_module.COMPARE_S = 0.0
    now = [0.0]
    straggler_module.time = SimpleNamespace(perf_counter=lambda: now[0])

    class Net(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, inputs: torch.Tensor) -> Any:
            now[0] += 0.05 if dist.get_rank() == slow else 0.001
            return self.layer(inputs)

    with start(save_minutes=None, agree_every=2) as run:
        model = DistributedDataParallel(run.watch(Net()))
        for _ in range(steps):
            model(torch.ones(3, 2)).sum().backward()
            run.end_step()


def measured(out: str) -> None:
    """Metrics of every kind."""
    with start(save_minutes=None, total_steps=3, log_seconds=0) as run:
        run.end_step(loss=torch.tensor(2.5, requires_grad=True), learning_rate=1e-3)
        run.end_step(loss=float("nan"), tokens_per_s=7)
        run.log(eval_loss=1.25)
        run.end_step()


def workers(out: str, *, stop_at: int) -> None:
    """A loader whose worker processes fetch ahead of training."""
    with start(save_minutes=None) as run:
        loader = train.Loader(Squares(40), 4, seed=5, num_workers=2, prefetch_factor=2)
        run.restore(loader=loader)
        for epoch in loader.epochs(1):
            for indices, _ in loader:
                seen(out, epoch, run.step + 1, indices)
                run.end_step()
                if run.step == stop_at:
                    run.checkpoint(wait=True)
                    return


class Noisy(Squares):
    """Samples with random numbers of every kind, drawn in the loader's worker processes."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(6).double() + random.random() + np.random.rand()
        return index, super().__getitem__(index)[1] + noise


def strike(victim: str) -> None:
    """Kill this rank, or the first of its loader's workers."""
    workers = multiprocessing.active_children()
    pid = workers[0].pid if victim == "worker" and workers else os.getpid()
    os.kill(pid or os.getpid(), signal.SIGKILL)


def noisy(out: str, *, kill_step: int = 0, delay: float = 0.0, victim: str = "") -> None:
    """A net whose weights depend on all random numbers; ranks die a moment after the step begins."""
    with start(seed=7, save_every=3) as run:
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = train.Loader(Noisy(48), 4, seed=3, num_workers=2)
        run.restore(model=model, optimizer=optimizer, loader=loader)
        for epoch in loader.epochs(2):
            for indices, inputs in loader:
                if run.step + 1 == kill_step and victim in {str(run.rank), "both", "worker"}:
                    threading.Timer(delay, strike, [victim]).start()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen(out, epoch, run.step + 1, indices)
                run.end_step(loss=loss)
        finish(out, net)


def mismatched(out: str, *, features: int) -> None:
    """Save and restore a net of so many features."""
    with start(save_minutes=None) as run:
        run.restore(net=nn.Linear(features, 1))
        run.end_step()


def plain_signal(out: str) -> None:
    """Leave by one's own code: nothing was given to restore."""
    with start(save_minutes=None, agree_every=1) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        while not run.end_step():
            pass
        Path(out, "left").write_text(str(run.step))


def idle(out: str, **more: Any) -> None:
    """Write down where this process finds itself."""
    with start(**more) as run:
        place = {**vars(run.place), "device": str(run.device), "initialized": dist.is_initialized()}
        total = torch.tensor(run.rank + 1)
        dist.all_reduce(total)
        Path(out, f"place-{run.rank}.json").write_text(json.dumps({**place, "total": int(total)}))


PROGRAMS: dict[str, Callable[..., None]] = {
    item.__name__: item
    for item in (
        dropout,
        exact,
        swept,
        unreadable,
        lossy,
        overlapping,
        ordered,
        full,
        slow_rank,
        measured,
        workers,
        noisy,
        mismatched,
        plain_signal,
        idle,
    )
}
