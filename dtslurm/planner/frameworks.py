"""Properties of training frameworks: model states in memory and execution, from published code and rows.

Model states follow each framework's own code instead of a general table, because the same ZeRO stage differs
by up to 6 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class States(NamedTuple):
    """Bytes per parameter of one kind of state: ``kept`` on each rank, ``shared`` over the shard group."""

    kept: float
    shared: float


@dataclass(frozen=True)
class Framework:
    """A training framework, or a generation or configuration of one.

    Attributes:
        title: readable name.
        flash: attention does not store the scores.
        fused: normalizations, activations and rotary embeddings run as fused kernels.
        overlap: gradient and weight traffic overlaps with computation.
        dropout: dropout masks are stored, one byte per element.
        pads_vocab: the vocabulary is padded to a multiple of 128 per tensor-parallel rank.
        balanced: pipeline stages are cut by cost, so that the head's stage has fewer layers.
        short_moments: MoE models with latent attention keep Adam's moments in 16 bits.
        once_per_node: a token for several experts of a node crosses the network once (DeepEP, HybridEP).
        plain_routing: plain operators instead of a fused kernel sort and sum the experts' tokens.
        graphs: dense layers are replayed as CUDA graphs on slow hosts (see step.py).
        keeps_gathered: inputs that tensor parallelism gathers are kept for the backward pass.
        eager: RMSNorms and gated MLPs are sequences of PyTorch operators, and each operator keeps its input.
        like: the framework whose constants also apply to this one.
    """

    name: str
    title: str
    flash: bool = True
    overlap: bool = True
    dropout: bool = False
    balanced: bool = False
    pads_vocab: bool = False
    short_moments: bool = False
    once_per_node: bool = False
    plain_routing: bool = False
    graphs: bool = False
    keeps_gathered: bool = False
    eager: bool = False
    like: str = ""

    @property
    def family(self) -> str:
        """The framework whose constants apply to this one."""
        return self.like or self.name

    @property
    def variants(self) -> tuple[str, ...]:
        """The names under which constants are looked up, the most specific first."""
        return (self.name, self.family)

    @property
    def attention_kernels(self) -> str:
        """Attention kernels: ``vendor`` (cuDNN, Transformer Engine) or ``pytorch`` (FlashAttention-2)."""
        return "pytorch" if self.family in PYTORCH_KERNELS else "vendor"


FRAMEWORKS: dict[str, Framework] = {
    item.name: item
    for item in (
        Framework("megatron", "Megatron-LM with Transformer Engine", pads_vocab=True, plain_routing=True),
        Framework(
            "nemo",
            "NeMo / Megatron Bridge, 16-bit gradients",
            pads_vocab=True,
            short_moments=True,
            once_per_node=True,
            graphs=True,
            like="megatron",
        ),
        Framework(
            "nemo-2025",
            "NeMo 2 with DeepEP, before Megatron Bridge",
            pads_vocab=True,
            short_moments=True,
            once_per_node=True,
            plain_routing=True,
            like="megatron",
        ),
        Framework(
            "nemo-2024",
            "NeMo before Megatron Bridge, and Bridge's recipes that are not tuned for speed",
            pads_vocab=True,
            short_moments=True,
            plain_routing=True,
            graphs=True,
            like="megatron",
        ),
        Framework(
            "nemo-2023",
            "NeMo's launcher on A100: attention stores its scores",
            flash=False,
            pads_vocab=True,
            like="megatron",
        ),
        Framework(
            "megatron-2021", "Megatron-LM before flash attention", flash=False, overlap=False, dropout=True
        ),
        Framework(
            "megatron-deepspeed",
            "Megatron-DeepSpeed, as BLOOM was trained",
            flash=False,
            overlap=False,
            dropout=True,
            like="megatron-2021",
        ),
        Framework("deepspeed", "DeepSpeed", eager=True),
        Framework("fsdp", "PyTorch FSDP, eager, with Hugging Face's models", eager=True),
        Framework(
            "fsdp-2022",
            "PyTorch before flash attention, with Hugging Face's models",
            flash=False,
            dropout=True,
            eager=True,
            like="fsdp",
        ),
        Framework("llm-foundry", "LLM Foundry: PyTorch FSDP with fused norms and loss", like="fsdp"),
        Framework("torchtitan", "torchtitan: FSDP2 with torch.compile", keeps_gathered=True),
        Framework(
            "torchtitan-2024",
            "torchtitan before it compiled the loss",
            keeps_gathered=True,
            like="torchtitan",
        ),
        Framework(
            "torchtitan-eager",
            "torchtitan without torch.compile: torch's own RMSNorm keeps what a fused kernel does",
            keeps_gathered=True,
            like="torchtitan",
        ),
        Framework("torchtune", "torchtune with torch.compile", keeps_gathered=True, like="torchtitan"),
        Framework("torchtune-eager", "torchtune without torch.compile", eager=True, like="fsdp"),
        Framework("jax", "JAX: MaxText"),
        Framework("paxml", "JAX: Paxml, attention stores its scores", flash=False, like="jax"),
        Framework("nanotron", "nanotron", balanced=True),
    )
}


PYTORCH_KERNELS = {"deepspeed", "fsdp", "torchtitan", "nanotron"}
FSDP2 = {"fsdp", "torchtitan"}
DEEPSPEED = {"deepspeed", "megatron-deepspeed"}
NEMO = {"nemo", "nemo-2025", "nemo-2024", "nemo-2023"}
TORCHTUNE = {"torchtune", "torchtune-eager"}
SHARDING = {
    "fsdp",
    "fsdp-2022",
    "llm-foundry",
    "torchtitan",
    "torchtitan-2024",
    "torchtitan-eager",
    "jax",
    "paxml",
}  # the master weights are the weights; gathered copies are temporary


def states(framework: str, zero: int, precision: str) -> dict[str, States]:
    """Return the bytes per parameter of weights, gradients, master copies and Adam's moments.

    Sources: Megatron-LM docs/dist_optimizer and megatron/training/theoretical_memory_usage.py; DeepSpeed
    docs/memory.rst and runtime/zero; torchtitan's FSDP2 mixed precision; torchtune's recipes (``dtype: bf16``
    trains the 16-bit weights without a copy); Rajbhandari et al. 2020 (arXiv:1910.02054) for the ZeRO stages.
    """
    if precision == "fp32":
        bytes_by_kind = {"weights": 4.0, "gradients": 4.0, "master_weights": 0.0, "optimizer": 8.0}
    elif framework in TORCHTUNE:
        bytes_by_kind = {"weights": 2.0, "gradients": 2.0, "master_weights": 0.0, "optimizer": 4.0}
    elif framework in SHARDING:
        bytes_by_kind = {"weights": 0.0, "gradients": 4.0, "master_weights": 4.0, "optimizer": 8.0}
        if zero < 3:  # autocast keeps a 16-bit copy of the 32-bit weights during the step
            bytes_by_kind["weights"] = 2.0
    elif framework in DEEPSPEED:
        bytes_by_kind = {"weights": 2.0, "gradients": 2.0, "master_weights": 4.0, "optimizer": 8.0}
    else:
        bytes_by_kind = {"weights": 2.0, "gradients": 4.0, "master_weights": 4.0, "optimizer": 8.0}
    if framework in NEMO and precision != "fp32":
        bytes_by_kind["gradients"] = 2.0  # NeMo's recipes disable accumulate_allreduce_grads_in_fp32
    sharded_kinds = {
        0: (),
        1: ("master_weights", "optimizer"),
        2: ("master_weights", "optimizer", "gradients"),
    }.get(zero, ("master_weights", "optimizer", "gradients", "weights"))
    states_by_kind = {
        key: States(0, size) if key in sharded_kinds else States(size, 0)
        for key, size in bytes_by_kind.items()
    }
    if framework == "megatron-deepspeed" and zero == 1 and precision == "bf16":
        # BF16_Optimizer accumulates gradients in 32 bits on each rank: bf16_optimizer.py
        states_by_kind["gradients"] = States(6, 0)
    elif framework in DEEPSPEED and zero in {1, 2}:
        # each rank keeps a 32-bit copy of its gradient shard: stage_1_and_2.py
        states_by_kind["gradients"] = States(
            states_by_kind["gradients"].kept, states_by_kind["gradients"].shared + 4
        )
    if framework in SHARDING and zero == 2:
        states_by_kind["master_weights"] = States(0, 4)
    return states_by_kind
