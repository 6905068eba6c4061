"""``fail.py WAY``: train a little on the GPU, then fail there for real."""

from __future__ import annotations

import os
import sys

import torch

GIB = 1024**3


def run_out_of_memory() -> None:
    kept = []
    while True:
        kept.append(torch.empty(4 * GIB, dtype=torch.uint8, device="cuda"))
        print("holds", len(kept) * 4, "GiB", flush=True)


def read_beyond_memory() -> None:
    """Read far behind a tensor of one kilobyte."""
    small = torch.zeros(1024, dtype=torch.uint8, device="cuda")

    class Longer:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol's name and form
            "shape": (1 << 40,),
            "typestr": "|u1",
            "data": (small.data_ptr(), False),
            "version": 3,
        }

    longer = torch.as_tensor(Longer(), device="cuda")
    print("sum", int(longer[1 << 39 :: 1 << 30].sum()), flush=True)


def look_up_a_token_that_is_none() -> None:
    table = torch.nn.Embedding(100, 8, device="cuda")
    print("sum", table(torch.tensor([100], device="cuda")).sum().item(), flush=True)


def diverge() -> None:
    """Overflow 16-bit floats, and stop as training code does."""
    net = torch.nn.Linear(8, 8, device="cuda", dtype=torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e4)
    for step in range(50):
        loss = net(torch.full((4, 8), 10.0, device="cuda", dtype=torch.float16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item()}", flush=True)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} in step {step}, stopping")


def take_one_gpu_twice() -> None:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))


def name_no_network() -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "=nosuch0"
    os.environ["NCCL_IB_DISABLE"] = "1"
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))


def take_a_gpu_that_is_none() -> None:
    torch.cuda.set_device(7)


def see_no_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.ones(1, device="cuda")


def multiply_without_room() -> None:
    """Leave no memory for what matrix products need beside their operands."""
    a = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    kept = []
    for size in (GIB, GIB >> 6, GIB >> 10):
        try:
            while True:
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            print("full, in pieces of", size, flush=True)
    print("sum", (a @ a).sum().item(), flush=True)


WAYS = {
    "out-of-memory": run_out_of_memory,
    "illegal-access": read_beyond_memory,
    "device-assert": look_up_a_token_that_is_none,
    "nan-loss": diverge,
    "one-gpu-twice": take_one_gpu_twice,
    "no-network": name_no_network,
    "no-such-gpu": take_a_gpu_that_is_none,
    "hidden-gpu": see_no_gpu,
    "no-room-for-cublas": multiply_without_room,
}

FIRST_OF_ALL = {"hidden-gpu", "no-room-for-cublas"}  # a multiplication before would spoil these

if __name__ == "__main__":
    if sys.argv[1] not in FIRST_OF_ALL:
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)
        for step in range(3):
            print(f"step {step} loss {(weight @ weight).square().mean().item():.4f}", flush=True)
    WAYS[sys.argv[1]]()
