"""``measure.py CONFIGURATIONS.json``: train each for a few steps; print what one GPU needed for it.

Models are Hugging Face's own code with random weights. ``fsdp`` shards each layer and the whole by FSDP2 (on
one GPU that gathers and reduces over one rank) with 16-bit products and 32-bit masters; ``deepspeed`` is its
engine at a ZeRO stage. One process trains all, and prints a line of JSON for each.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

WARM_UP = 3  # steps that are not timed: kernels are chosen, the allocator grows
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 1024**3


def build(row: dict[str, Any]) -> torch.nn.Module:
    """Return the model with random weights in 32 bits, on the GPU."""
    config = AutoConfig.for_model(**row["model"])
    config.use_cache = False
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if row["recompute"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def shard(model: torch.nn.Module, precision: str) -> None:
    """Shard each layer and the whole over the ranks."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for layer in max(lists, key=lambda result: sum(p.numel() for p in result.parameters())):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def optimizer_of(row: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=row["optimizer"] == "fused")


class Fsdp:
    """Training by FSDP2."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.model = build(row)
        shard(self.model, row["precision"])
        self.optimizer = optimizer_of(row, self.model)
        self.micro_batches = row["gbs"] // row["mbs"]

    def step(self, tokens: torch.Tensor) -> float:
        for _ in range(self.micro_batches):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / self.micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class DeepSpeed:
    """Training by DeepSpeed's engine."""

    def __init__(self, row: dict[str, Any]) -> None:
        import deepspeed

        model = build(row)
        config = {
            "train_micro_batch_size_per_gpu": row["mbs"],
            "train_batch_size": row["gbs"],
            "zero_optimization": {"stage": row["zero"]},
            "bf16": {"enabled": row["precision"] == "bf16"},
            "zero_allow_untested_optimizer": True,
            "wall_clock_breakdown": False,
        }
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(row, model), config=config)
        self.micro_batches = row["gbs"] // row["mbs"]

    def step(self, tokens: torch.Tensor) -> float:
        for _ in range(self.micro_batches):
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
        return float(loss.detach())


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Return the median step time in seconds, torch's allocated and reserved peaks in GiB, and the losses."""
    torch.manual_seed(0)
    training = Fsdp(row) if row["framework"] == "fsdp" else DeepSpeed(row)
    vocabulary = row["model"]["vocab_size"]
    tokens = torch.randint(vocabulary, (row["mbs"], row["seq_len"]), device=DEVICE)
    seconds, losses = [], []
    for step in range(WARM_UP + row["steps"]):
        synchronize()
        started = time.perf_counter()
        losses.append(training.step(tokens))
        synchronize()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    result = {"step_time_s": statistics.median(seconds), "slowest_s": max(seconds)}
    result |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if DEVICE == "cuda":
        result["memory_gib"] = torch.cuda.max_memory_allocated() / GIB
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        free, total = torch.cuda.mem_get_info()
        result["device_gib"] = (total - free) / GIB
    return result


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29431"), ("RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    metrics = os.environ.get("DTSLURM_METRICS")
    for row in json.loads(Path(sys.argv[1]).read_text()):
        started = time.perf_counter()
        try:
            result = measure(row)
        except torch.OutOfMemoryError as error:
            result = {"out_of_memory": str(error).partition(".")[0]}
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            result = {"error": f"{type(error).__name__}: {error}"[:400]}
        result["seconds"] = time.perf_counter() - started
        print(json.dumps({**row, **result}), flush=True)
        if metrics and "step_time_s" in result:
            with Path(metrics).open("a") as file:
                file.write(json.dumps({key: result[key] for key in result if key != "seconds"}) + "\n")
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
