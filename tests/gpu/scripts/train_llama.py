"""``train_llama.py accelerate | deepspeed CONFIG | torchrun OPTIONS``: Llama-3.2-1B as ``plan`` has it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 5
SHAPE = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    use_cache=False,
)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(SHAPE)


def tokens(size: int) -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (size, 2048), device="cuda")


def report(step: int, loss: torch.Tensor) -> None:
    print(f"step {step} loss {loss.item():.4f}", flush=True)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    print("by", accelerator.distributed_type.value, accelerator.mixed_precision, flush=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    batch = tokens(2)
    for step in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    accelerator.end_training()


def deepspeed() -> None:
    import deepspeed

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = json.loads(Path(sys.argv[2]).read_text())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = tokens(config["train_micro_batch_size_per_gpu"])
    for step in range(STEPS):
        for _ in range(config["gradient_accumulation_steps"]):
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
        report(step, loss)
    torch.distributed.destroy_process_group()


def torchrun() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    parser = argparse.ArgumentParser()
    for name in ("--micro-batch-size", "--gradient-accumulation-steps", "--seq-len"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args(sys.argv[2:])
    model = build()
    for block in (*model.model.layers, model):
        shard(block, init_device_mesh, fully_shard, MixedPrecisionPolicy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = tokens(args.micro_batch_size)
    for step in range(STEPS):
        for _ in range(args.gradient_accumulation_steps):
            loss = model(input_ids=batch, labels=batch).loss
            (loss / args.gradient_accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    torch.distributed.destroy_process_group()


def shard(block, init_device_mesh, fully_shard, MixedPrecisionPolicy) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    "What plan printed is pasted below."
    # the lines that plan printed


if __name__ == "__main__":
    {"accelerate": accelerate, "deepspeed": deepspeed, "torchrun": torchrun}[sys.argv[1]]()
