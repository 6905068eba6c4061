"""Model shapes: the structure of a model that determines its memory and time.

A model is an embedding, a list of :class:`Stack` (equal layers) and a head. Parameter counts are exact: they
match the published checkpoints (tests/planner/test_shapes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple


class Gemm(NamedTuple):
    """A matrix product for each token, with ``k`` inputs and ``n`` outputs per token.

    ``split`` is the dimension that tensor parallelism divides: ``n`` (column parallel), ``k`` (row parallel),
    or empty for none.
    """

    name: str
    n: int
    k: int
    split: str


@dataclass(frozen=True)
class Attention:
    """Self attention; multi-head latent attention where ``kv_rank`` is set (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        head_dim: width of a query or key head, including the rotary part.
        value_dim: width of a value head; equal to ``head_dim`` except in latent attention.
        q_rank, kv_rank, rope_dim: latent attention's compressed widths, and the rotary part of a head.
        window: sliding window in tokens, None for full attention.
        sinks: whether each head has a learned sink score (gpt-oss).
        causal: whether only half of the score matrix is needed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    window: int | None = None
    causal: bool = True

    def gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Return the projections of attention."""
        out = Gemm("proj", hidden_size, self.heads * self.value_dim, "k")
        if not self.kv_rank:
            width = self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_dim)
            return (Gemm("qkv", width, hidden_size, "n"), out)
        nope = self.head_dim - self.rope_dim
        down: tuple[Gemm, ...] = (Gemm("kv_down", self.kv_rank + self.rope_dim, hidden_size, ""),)
        up = (Gemm("kv_up", self.heads * (nope + self.value_dim), self.kv_rank, "n"),)
        if self.q_rank:
            down += (Gemm("q_down", self.q_rank, hidden_size, ""),)
        query = (Gemm("q_up", self.heads * self.head_dim, self.q_rank or hidden_size, "n"),)
        return (*down, *query, *up, out)

    def small_params(self, hidden_size: int) -> int:
        """Return the number of parameters outside matrices: biases, sinks and the norms inside attention."""
        count = hidden_size if self.out_bias else 0
        if self.qkv_bias:
            count += self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_dim)
        count += self.heads if self.sinks else 0
        if self.qk_norm:
            count += 2 * self.head_dim
        return count + self.q_rank + self.kv_rank


@dataclass(frozen=True)
class Experts:
    """Experts in place of the MLP; ``ffn`` is the width of an expert, ``shared_ffn`` of the shared ones."""

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    router_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class Stack:
    """A number of equal layers.

    Attributes:
        norms: normalizations per layer over the hidden width.
        norm_bias: whether a normalization has a bias in addition to its scale (LayerNorm).
        cross: whether layers also attend to another stack's output, with the same shape as ``attention``.
        encoder: whether the layers process the source sequence of an encoder-decoder model.
    """

    count: int
    attention: Attention
    ffn: int
    gated: bool
    experts: Experts | None = None
    mlp_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    cross: bool = False
    encoder: bool = False

    def attention_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Return the projections of all attentions of one layer."""
        gemms = self.attention.gemms(hidden_size)
        return gemms * 2 if self.cross else gemms

    def mlp_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Return the dense products of one layer's MLP; for MoE, of its shared expert and router."""
        width = self.experts.shared_ffn if self.experts else self.ffn
        gemms: tuple[Gemm, ...] = ()
        if width:
            gemms = (
                Gemm("mlp_up", width * (2 if self.gated else 1), hidden_size, "n"),
                Gemm("mlp_down", hidden_size, width, "k"),
            )
        if self.experts:
            gemms += (Gemm("router", self.experts.count, hidden_size, ""),)
        return gemms

    def expert_params(self, hidden_size: int) -> int:
        """Return the number of parameters of one routed expert, 0 for a dense layer."""
        if not self.experts:
            return 0
        matrices = (3 if self.gated else 2) * hidden_size * self.experts.ffn
        bias = self.experts.ffn * (2 if self.gated else 1) + hidden_size if self.mlp_bias else 0
        return matrices + bias

    def dense_params(self, hidden_size: int) -> int:
        """Return the number of parameters of one layer without its routed experts."""
        gemms = (*self.attention_gemms(hidden_size), *self.mlp_gemms(hidden_size))
        count = sum(gemm.n * gemm.k for gemm in gemms)
        count += self.attention.small_params(hidden_size) * (2 if self.cross else 1)
        count += self.norms * hidden_size * (2 if self.norm_bias else 1)
        if self.experts:
            count += self.experts.count if self.experts.router_bias else 0
            count += hidden_size if self.experts.shared_gate else 0
        elif self.mlp_bias:
            count += self.ffn * (2 if self.gated else 1) + hidden_size
        return count

    def params(self, hidden_size: int) -> int:
        """Return the number of parameters of one layer."""
        experts = self.experts.count * self.expert_params(hidden_size) if self.experts else 0
        return self.dense_params(hidden_size) + experts


@dataclass(frozen=True)
class Generic:
    """A model given only by its totals, such as a convolutional network.

    Attributes:
        forward_flops: FLOPs of one sample's forward pass, with multiply and add counted separately.
        activation_bytes: bytes kept for the backward pass of one sample.
    """

    params: int
    forward_flops: float
    activation_bytes: float


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model.

    Attributes:
        vocab: number of rows of the token embedding, 0 without an embedding.
        seq_len: maximum sequence length of the model.
        tied: whether the head shares the embedding's matrix.
        positions: number of parameters of learned positions.
        extra_params: number of other parameters outside the layers (poolers, patch embeddings, classifiers).
        final_norms: number of normalizations outside the layers.
        generic: the totals of a model that is not a transformer, in place of stacks.
        assumptions: assumptions about values that the description does not state.
    """

    name: str
    hidden: int
    stacks: tuple[Stack, ...]
    vocab: int = 0
    seq_len: int = 2048
    tied: bool = False
    head: bool = True
    positions: int = 0
    extra_params: int = 0
    final_norms: int = 1
    generic: Generic | None = None
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def layers(self) -> int:
        """Number of layers in all stacks."""
        return sum(stack.count for stack in self.stacks)

    @cached_property
    def embedding_params(self) -> int:
        """Number of parameters of the token embedding."""
        return self.vocab * self.hidden

    @cached_property
    def head_params(self) -> int:
        """Number of parameters of an untied head, else 0."""
        return self.embedding_params if self.head and not self.tied else 0

    @cached_property
    def layer_params(self) -> int:
        """Number of parameters of all layers, including all experts."""
        return sum(stack.count * stack.params(self.hidden) for stack in self.stacks)

    @cached_property
    def expert_params(self) -> int:
        """Number of parameters of the routed experts in all layers."""
        return sum(
            stack.count * stack.experts.count * stack.expert_params(self.hidden)
            for stack in self.stacks
            if stack.experts
        )

    @cached_property
    def params(self) -> int:
        """Number of all parameters."""
        if self.generic:
            return self.generic.params
        bias = self.stacks[0].norm_bias if self.stacks else False
        norms = self.final_norms * self.hidden * (2 if bias else 1)
        own = self.embedding_params + self.head_params + self.positions + self.extra_params
        return own + self.layer_params + norms

    @cached_property
    def active_params(self) -> int:
        """Number of parameters that a token uses: top-k of the experts, and all others."""
        unused = sum(
            stack.count * (stack.experts.count - stack.experts.top_k) * stack.expert_params(self.hidden)
            for stack in self.stacks
            if stack.experts
        )
        return self.params - unused

    @cached_property
    def matmul_params(self) -> int:
        """Number of active parameters in matrix products: layers and head, without the embedding lookup."""
        if self.generic:
            return self.generic.params
        total = self.vocab * self.hidden if self.head else 0
        for stack in self.stacks:
            gemms = (*stack.attention_gemms(self.hidden), *stack.mlp_gemms(self.hidden))
            routed = stack.experts.top_k * stack.expert_params(self.hidden) if stack.experts else 0
            total += stack.count * (sum(gemm.n * gemm.k for gemm in gemms) + routed)
        return total

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(stack.experts for stack in self.stacks)

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a causal, decoder-only language model."""
        return bool(self.vocab and self.stacks) and all(
            stack.attention.causal and not stack.cross for stack in self.stacks
        )

    def attention_flops(self, seq_len: int, *, causal: bool) -> float:
        """Return the forward FLOPs per token of attention scores and their product with the values.

        With ``causal``, only the needed half of the scores counts, within the sliding window if there is one.
        Otherwise every layer counts as full attention, the convention of PaLM (arXiv:2204.02311, appendix B).
        """
        total = 0.0
        for stack in self.stacks:
            attention = stack.attention
            span = float(seq_len)
            if causal:
                span = min(seq_len, attention.window or seq_len)
                if attention.causal:
                    span = span / 2 if span == seq_len else span * (1 - span / (2 * seq_len))
            width = attention.heads * (attention.head_dim + attention.value_dim)
            total += stack.count * 2 * width * span * (2 if stack.cross else 1)
        return total

    def flops_per_token(self, seq_len: int, *, causal: bool = False, frozen: bool = False) -> float:
        """Return the model FLOPs of one token's forward and backward pass: 6 N_matmul + attention.

        With ``frozen`` weights, no weight gradients are computed, so the count is 4 N_matmul + attention.
        """
        if self.generic:
            return 3 * self.generic.forward_flops
        passes = 4 if frozen else 6
        return passes * self.matmul_params + 3 * self.attention_flops(seq_len, causal=causal)

    def with_layers(self, count: int) -> ModelShape:
        """Return the model shortened or extended to ``count`` layers, like the proxy models of benchmarks."""
        if count == self.layers or not self.stacks:
            return self
        new_stacks: list[Stack] = []
        remaining = count
        for index, stack in enumerate(self.stacks):
            is_last = index == len(self.stacks) - 1
            layers = remaining if is_last else min(stack.count, remaining)
            if layers > 0:
                new_stacks.append(replace(stack, count=layers))
            remaining -= layers
        return replace(self, stacks=tuple(new_stacks))
