"""Train a small convolutional network on handwritten digits, in one process or in many.

    dtslurm submit --ntasks-per-node 2 -l torchrun examples/digits/train.py

The script also runs with torchrun, with srun if RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
set, and as a single process: `python train.py`. The 1,797 images of 8x8 pixels are part of scikit-learn.

The job sets $DTSLURM_CHECKPOINT_DIR (the folder of the checkpoint) and $DTSLURM_METRICS (a file for metrics
in JSON lines). Exit code 0 means that the training is complete, 85 that the script saved a checkpoint after
a signal and has to be continued, any other code that it failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# DistributedDataParallel imports this module, which keeps a reference to the process group of that time. The
# group's threads would outlive destroy_process_group and could crash Python at exit. Therefore this script
# imports the module before the group exists.
import torch.distributed.nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path(os.environ.get("DTSLURM_CHECKPOINT_DIR", "checkpoints")) / "digits.pt"
CONTINUE = 85
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)

stop_requested = False


def main() -> int:
    """Join the process group, train, leave the group; return the exit code."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, request_stop)
    args = parse_args()
    device = join_processes()
    rank = dist.get_rank()
    me = f"rank {rank}/{dist.get_world_size()} on {socket.gethostname()}"
    say(f"{me}: starts on {device}")
    start = time.perf_counter()
    epochs_done, accuracy = train(args, device)
    # Launchers may terminate the other ranks after the first exit. Slower ranks keep their exit code.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    dist.destroy_process_group()

    if epochs_done < args.epochs:
        say(f"{me}: received a signal, saved after epoch {epochs_done}; the next run continues there")
        return CONTINUE
    say(f"{me}: done after {time.perf_counter() - start:.1f} s")
    if rank == 0:
        say(f"test accuracy {100 * accuracy:.1f} %, model in {CHECKPOINT}")
    if args.min_accuracy is not None and accuracy < args.min_accuracy:
        sys.stderr.write(f"{me}: accuracy {accuracy:.4f} is below {args.min_accuracy} (--min-accuracy)\n")
        return 1
    return 0


def train(args: argparse.Namespace, device: torch.device) -> tuple[int, float]:
    """Train and save after each epoch; return the finished epochs of all runs, and the accuracy."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, world_size, rank, seed=args.seed)
    loader = DataLoader(train_data, args.batch_size // world_size, sampler=sampler)
    torch.manual_seed(args.seed)
    net = build_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), args.lr)
    epochs_before = resume(net, optimizer)
    model = DistributedDataParallel(net)

    start = time.perf_counter()
    for epoch in range(epochs_before + 1, args.epochs + 1):
        if (rank, epoch) == (args.fail_rank, args.fail_epoch):
            sys.stderr.write(f"rank {rank}: drill, leaving with exit code {args.fail_code}\n")
            sys.stderr.flush()
            os._exit(args.fail_code)  # without leaving the process group, as after a crash
        # Seed each epoch, so that a resumed run ends with the same model as an uninterrupted run.
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1_000_003 * epoch + 10_007 * rank)
        loss, images_per_s = train_epoch(model, optimizer, loader, epoch, args)
        accuracy = evaluate(net, test_data, device)
        time.sleep(args.epoch_sleep)
        if rank == 0:
            save(epoch, net, optimizer)
            seconds_left = (time.perf_counter() - start) / (epoch - epochs_before) * (args.epochs - epoch)
            say(
                f"epoch {epoch:2}/{args.epochs} [{'#' * (12 * epoch // args.epochs):.<12}] loss {loss:.3f}  "
                f"accuracy {100 * accuracy:.1f} %  {images_per_s:,.0f} img/s  ETA {seconds_left:.0f} s"
            )
            lr = optimizer.param_groups[0]["lr"]
            write_metrics(loader, epoch, args.epochs, loss=loss, lr=lr, samples_per_s=images_per_s)
        if agree_to_stop(device) and epoch < args.epochs:
            return epoch, accuracy

    accuracy = evaluate(net, test_data, device)
    if rank == 0:
        write_metrics(loader, args.epochs, args.epochs, test_accuracy=accuracy)
    return args.epochs, accuracy


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all processes")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, metavar="0..1", help="fail when the result is below")
    drill = parser.add_argument_group("drill", "to see how dtslurm handles a failure or a signal")
    drill.add_argument("--fail-rank", type=int, metavar="R", help="let this rank exit ...")
    drill.add_argument("--fail-epoch", type=int, default=1, metavar="E", help="... as this epoch starts ...")
    drill.add_argument("--fail-code", type=int, default=1, metavar="C", help="... with this exit code")
    drill.add_argument("--epoch-sleep", type=float, default=0, metavar="S", help="sleep this long an epoch")
    args = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    if args.batch_size < 1 or args.batch_size % processes:
        parser.error(f"--batch-size must be a multiple of the number of processes, {processes}")
    return args


def say(text: str) -> None:
    """Print a line with a single write, because several ranks may share one output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def request_stop(_signum: int, _frame: object) -> None:
    """Request a stop after the current epoch. The handler may be called more than once."""
    global stop_requested  # noqa: PLW0603 - a signal handler can do little else safely
    stop_requested = True


def agree_to_stop(device: torch.device) -> bool:
    """Return whether any rank received a signal. All ranks stop together."""
    flag = torch.tensor(int(stop_requested), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def join_processes() -> torch.device:
    """Join the process group and return the device of this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        # Depending on the site, a process sees all GPUs of the node or only its own; the modulo handles both.
        gpu = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        backend, device = "nccl", torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the images for training and for the test, with the same split in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_net() -> nn.Module:
    """Return three convolutions and two linear layers."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def shift(images: torch.Tensor) -> torch.Tensor:
    """Shift each image randomly by up to one pixel in both directions, to augment the small data set."""
    n, _, height, width = images.shape
    windows = pad(images, (1, 1, 1, 1)).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(0, 3, (2, n))
    return windows[torch.arange(n), :, down, right]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    epoch: int,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Train on each image once; return the mean loss and the images per second of all ranks together."""
    device = next(model.parameters()).device
    model.train()
    start, loss_sum, seen = time.perf_counter(), 0.0, 0
    for step, (images, labels) in enumerate(loader, (epoch - 1) * len(loader) + 1):
        progress = step / (args.epochs * len(loader))
        for group in optimizer.param_groups:  # a short warm-up, then a cosine decay to zero
            group["lr"] = args.lr * min(1.0, 10 * progress) * (1 + math.cos(math.pi * progress)) / 2
        loss = cross_entropy(model(shift(images).to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        seen += len(labels)
    totals = torch.tensor([loss_sum, seen], device=device)
    dist.all_reduce(totals)
    return totals[0].item() / totals[1].item(), totals[1].item() / (time.perf_counter() - start)


def evaluate(net: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy on the test images."""
    # Each rank evaluates every n-th image. A DistributedSampler would repeat some images to fill its shards.
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in data.tensors)
    net.eval()
    with torch.no_grad():
        right = (net(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return int(right) / len(data)


def save(epoch: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint atomically, because the job may be killed at any time."""
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    unfinished = CHECKPOINT.with_suffix(".tmp")
    torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    unfinished.replace(CHECKPOINT)


def resume(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if it exists; return the number of its finished epochs."""
    # Rank 0 broadcasts the checkpoint, so that all ranks continue from the same state on any disk.
    found: list[Any] = [None]
    if dist.get_rank() == 0 and CHECKPOINT.exists():
        found = [torch.load(CHECKPOINT, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    net.load_state_dict(found[0]["net"])
    optimizer.load_state_dict(found[0]["optimizer"])
    if dist.get_rank() == 0:
        say(f"continues after epoch {found[0]['epoch']} from {CHECKPOINT}")
    return int(found[0]["epoch"])


def write_metrics(loader: DataLoader[Any], epoch: int, epochs: int, **values: float) -> None:
    """Append a line to the metrics file if the job sets one."""
    if not (path := os.environ.get("DTSLURM_METRICS")):
        return
    steps = {"step": epoch * len(loader), "total_steps": epochs * len(loader), "epoch": epoch}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **steps, **values}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
