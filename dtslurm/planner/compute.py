"""Time of the kernels of one layer on one GPU, seconds, for the tokens of one micro-batch.

Matrix products follow the tiles a GPU works on: time grows with whole and half-filled waves of 128 x 256
tiles over the processors, plus a start-up along the inner dimension; none is faster than its operands come
from memory. Attention has an efficiency of its own, everything else is memory traffic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.hardware import Gpu
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import Gemm, ModelShape, Stack

TILE_M, TILE_N = 128, 256


class LayerCost(NamedTuple):
    """Seconds of one layer's forward pass by kernel class; ``backward`` of each class in the same order."""

    matmul: float
    experts: float
    attention: float
    elementwise: float
    matmul_backward: float
    experts_backward: float
    attention_backward: float
    elementwise_backward: float

    @property
    def forward(self) -> float:
        """The whole forward pass."""
        return self.matmul + self.experts + self.attention + self.elementwise

    @property
    def backward(self) -> float:
        """The whole backward pass, without recomputation."""
        return (
            self.matmul_backward + self.experts_backward + self.attention_backward + self.elementwise_backward
        )


class Kernels:
    """One GPU running one framework's kernels at one precision."""

    def __init__(
        self, gpu: Gpu, framework: str, precision: str, constants: Constants, frozen: bool = False
    ) -> None:
        self.learning = 0.0 if frozen else 1.0  # whether gradients of weights are computed
        self.framework = FRAMEWORKS[framework]
        self.eight_bit = precision in {"fp8", "fp4"} and gpu.fp8_tflops > 0
        of = constants.of
        named = self.framework.variants
        framework = self.framework.family
        bf16 = gpu.matmul_tflops * of("matmul", *gpu.variants)
        rate = bf16
        if precision == "fp32":
            rate *= of("fp32_share", *gpu.variants)
        self.attention_rate = (
            gpu.matmul_tflops * 1e12 * of("attention", *gpu.variants) * of("attention_software", framework)
        )
        if self.eight_bit:
            rate = gpu.fp8_tflops * of("matmul_fp8", *gpu.variants)
            rate *= of("matmul_fp4_gain", *gpu.variants) if precision == "fp4" else 1.0
        self.dense_rate = bf16 * 1e12
        self.rate = rate * 1e12
        self.hbm = gpu.hbm_gbs * 1e9 * constants["hbm_efficiency"]
        self.sms = gpu.sms
        self.tail = constants["gemm_tail_waves"]
        self.ramp = constants["gemm_ramp_k"]
        self.unaligned = constants["unaligned_slowdown"]
        self.odd = constants["odd_slowdown"]
        self.gap = constants["kernel_gap_us"] * 1e-6
        self.expert_ramp = of("expert_ramp_ffn", *named)
        self.expert_gap = of("expert_gap_us", *named) * 1e-6
        self.traffic = of("elementwise", framework)
        self.small = of("elementwise_floor_us", framework) * 1e-6  # of a layer's small kernels, each way
        self.attention_ramp = constants["attention_ramp_s"]
        self.scores = constants["scores_traffic"]
        self.cast = constants["fp8_cast_bytes"] if self.eight_bit else 0.0

    def gemm(self, m: float, n: float, k: float, *, wide: bool = False, batch: int = 1) -> float:
        """Return the time of ``batch`` products of m x k by k x n; ``wide`` ones stay in 16 bits."""
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        tiles = batch * math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
        filled = batch * m * n / (TILE_M * TILE_N)
        slowed = (tiles + self.tail * self.sms) / filled * (1 + self.ramp / k)
        if n % 8 or k % 8:  # rows that start anywhere: no tensor core reads them whole
            slowed *= self.odd
        elif n % 64 or k % 64:  # rows that no 128-byte line starts with
            slowed *= self.unaligned
        flops = 2.0 * batch * m * n * k
        rate = self.dense_rate if wide else self.rate
        moved = batch * (m * k + k * n + m * n) * (2.0 if wide or not self.eight_bit else 1.4)
        return max(flops * slowed / rate, moved / self.hbm) + self.gap

    def pair(self, m: float, gemm: Gemm, tp: int) -> tuple[float, float]:
        """Return forward and backward time of one product of the model, tensor parallel."""
        n = gemm.n / tp if gemm.split == "n" else gemm.n
        k = gemm.k / tp if gemm.split == "k" else gemm.k
        if gemm.name == "router":
            time = self.gemm(m, n, k, wide=True)
            return time, (1 + self.learning) * time
        return self.gemm(m, n, k), self.gemm(m, k, n) + self.learning * self.gemm(n, k, m)

    def attend(self, stack: Stack, tokens: float, seq_len: int, layout: Layout) -> tuple[float, float]:
        """Return forward and backward time of scores, softmax and their product with the values."""
        att = stack.attention
        span = float(min(seq_len, att.window or seq_len))
        width = att.heads * (att.head_dim + att.value_dim) / layout.tp
        if self.framework.flash:
            if att.causal:
                span = span / 2 if span == seq_len else span
            ramp = 1 + self.attention_ramp / seq_len
            narrow = 1.0 if att.head_dim >= 128 else (128 / att.head_dim) ** 0.35
            time = 2.0 * tokens * width * span * ramp * narrow / self.attention_rate + self.gap
            return time, 2.5 * time
        time = 2.0 * tokens * width * span / self.attention_rate
        if att.head_dim % 8:  # as in gemm: no tensor core reads such rows whole
            time *= self.odd
        time += self.scores * tokens * span * att.heads / layout.tp / self.hbm
        return time, 2.0 * time

    def layer(self, stack: Stack, hidden: int, seq_len: int, layout: Layout) -> LayerCost:
        """Return the cost of one layer for one micro-batch."""
        tokens = layout.mbs * seq_len / layout.cp
        tp = layout.tp
        matmul = matmul_back = 0.0
        for gemm in (*stack.attention_gemms(hidden), *stack.mlp_gemms(hidden)):
            ahead, back = self.pair(tokens, gemm, tp)
            matmul += ahead
            matmul_back += back
        attention, attention_back = self.attend(stack, tokens, seq_len, layout)
        if stack.cross:
            attention, attention_back = 2 * attention, 2 * attention_back
        experts, experts_back = self.experts(stack, hidden, tokens, layout)
        bytes_moved = tokens * self.elementwise_bytes(stack, hidden, layout)
        elementwise = bytes_moved * self.traffic / self.hbm + self.small
        return LayerCost(
            matmul,
            experts,
            attention,
            elementwise,
            matmul_back,
            experts_back,
            attention_back,
            2 * elementwise,
        )

    def experts(self, stack: Stack, hidden: int, tokens: float, layout: Layout) -> tuple[float, float]:
        """Return forward and backward time of the routed experts' products, routing balanced."""
        if not stack.experts:
            return 0.0, 0.0
        local = max(1, stack.experts.count // layout.ep)
        routed = tokens * stack.experts.top_k * layout.expert_tp / layout.tp
        ffn = stack.experts.ffn / layout.expert_tp
        rows = routed / local
        up = ffn * (2 if stack.gated else 1)
        ahead = self.gemm(rows, up, hidden, batch=local) + self.gemm(rows, hidden, ffn, batch=local)
        back = self.gemm(rows, hidden, up, batch=local) + self.gemm(rows, ffn, hidden, batch=local)
        back += self.learning * (
            self.gemm(up, hidden, rows, batch=local) + self.gemm(hidden, ffn, rows, batch=local)
        )
        extra = local * self.expert_gap
        grouped = 1 + self.expert_ramp / ffn  # ragged groups of narrow products run below a plain one's speed
        return ahead * grouped + 2 * extra, back * grouped + 4 * extra

    def elementwise_bytes(self, stack: Stack, hidden: int, layout: Layout) -> float:
        """Return bytes read and written per token by everything that is no matrix product, fused kernels.

        Norms read and write once, residuals read two and write one, activations as they are; rotary
        embedding touches queries and keys; routing copies every token to its experts and back. Without
        ``--moe-permute-fusion``, off by default in Megatron-LM, copies are sorted, weighed in 32 bits and
        added up by an operator each: 30 bytes where a fused kernel moves 12.
        """
        att, tp = stack.attention, layout.tp
        spread = tp if layout.sp else 1
        total = (4.0 * stack.norms + 6.0 * 2) * hidden / spread
        total += 4.0 * (att.heads + att.kv_heads) * att.head_dim / tp
        width = stack.ffn if not stack.experts else stack.experts.shared_ffn
        legs = 3 if stack.gated else 2
        total += 2.0 * legs * width / tp
        if stack.experts:
            routed = stack.experts.top_k * layout.expert_tp / tp
            copied = 30.0 if self.framework.plain_routing else 12.0
            total += routed * (2.0 * legs * stack.experts.ffn / layout.expert_tp + copied * hidden)
        if self.cast:
            total += self.cast * (2 * hidden + att.heads * att.value_dim + width) / tp
        return total

    def head(self, model: ModelShape, tokens: float, tp: int) -> tuple[float, float]:
        """Return forward and backward time of the head and the loss."""
        if not model.head or not model.vocab:
            return 0.0, 0.0
        n = model.vocab / tp
        if tp > 1 or self.framework.pads_vocab:
            n = -(-model.vocab // (128 * tp)) * 128
        loss = 8.0 * tokens * n / self.hbm
        ahead = self.gemm(tokens, n, model.hidden, wide=True)
        back = self.gemm(tokens, model.hidden, n, wide=True)
        back += self.learning * self.gemm(n, model.hidden, tokens, wide=True)
        return ahead + loss, back + loss
