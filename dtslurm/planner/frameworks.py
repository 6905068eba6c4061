"""What training frameworks keep in memory and how they run, as far as published code and rows tell.

Model states follow each framework's own code, not one textbook table: the same ZeRO stage differs by up to
6 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class States(NamedTuple):
    """Bytes per parameter of one kind of state: kept by every rank, and shared over the shard group."""

    kept: float
    shared: float


@dataclass(frozen=True)
class Framework:
    """One way to train.

    Attributes:
        title: as people write it.
        flash: attention never stores the scores.
        fused: normalisations, activations and rotary embeddings run as fused kernels.
        overlap: gradient and weight traffic runs beside computation.
        grad_bytes: of a gradient as it is kept.
        dropout: masks are stored, one byte each.
        balanced: pipeline stages are cut by cost, so that the head makes room for itself.
        like: the framework whose constants count for this one as well.
    """

    name: str
    title: str
    flash: bool = True
    overlap: bool = True
    grad_bytes: int = 4
    dropout: bool = False
    balanced: bool = False
    like: str = ""

    @property
    def family(self) -> str:
        """The framework whose constants count for this one."""
        return self.like or self.name


FRAMEWORKS: dict[str, Framework] = {
    item.name: item
    for item in (
        Framework("megatron", "Megatron-LM with Transformer Engine"),
        Framework("nemo", "NeMo / Megatron Bridge, 16-bit gradients", grad_bytes=2, like="megatron"),
        Framework(
            "megatron-2021", "Megatron-LM before flash attention", flash=False, overlap=False, dropout=True
        ),
        Framework("deepspeed", "DeepSpeed", grad_bytes=2),
        Framework("fsdp", "PyTorch FSDP, eager", grad_bytes=4),
        Framework("torchtitan", "torchtitan: FSDP2 with torch.compile", grad_bytes=4),
        Framework("jax", "JAX: MaxText, Paxml"),
        Framework("nanotron", "nanotron", balanced=True),
    )
}


def states(framework: str, zero: int, precision: str) -> dict[str, States]:
    """Return the bytes per parameter of weights, gradients, master copies and Adam's moments.

    Sources: Megatron-LM docs/dist_optimizer and megatron/training/theoretical_memory_usage.py; DeepSpeed
    docs/memory.rst and runtime/zero; torchtitan's FSDP2 mixed precision; Rajbhandari et al. 2020
    (arXiv:1910.02054) for the stages themselves.
    """
    if precision == "fp32":
        table = {"weights": 4.0, "gradients": 4.0, "master": 0.0, "optimizer": 8.0}
    elif framework in {"fsdp", "torchtitan", "jax"}:
        table = {"weights": 0.0, "gradients": 4.0, "master": 4.0, "optimizer": 8.0}
        if zero < 3:  # autocast keeps a 16-bit copy for the step beside the 32-bit weights
            table["weights"] = 2.0
    elif framework == "deepspeed":
        table = {"weights": 2.0, "gradients": 2.0, "master": 4.0, "optimizer": 8.0}
    else:
        table = {"weights": 2.0, "gradients": 4.0, "master": 4.0, "optimizer": 8.0}
    if framework == "nemo" and precision != "fp32":
        table["gradients"] = 2.0  # accumulate_allreduce_grads_in_fp32 is off in its recipes
    shared = {0: (), 1: ("master", "optimizer"), 2: ("master", "optimizer", "gradients")}.get(
        zero, ("master", "optimizer", "gradients", "weights")
    )
    found = {key: States(0, size) if key in shared else States(size, 0) for key, size in table.items()}
    if framework == "deepspeed" and zero in {1, 2}:
        # a 32-bit copy of its own gradient shard: stage_1_and_2.py
        found["gradients"] = States(found["gradients"].kept, found["gradients"].shared + 4)
    if framework in {"fsdp", "torchtitan", "jax"} and zero == 2:
        found["master"] = States(0, 4)
    return found
