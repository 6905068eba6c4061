"""Time in seconds of the kernels of one layer on one GPU, for the tokens of one micro-batch.

The time of a matrix product follows its tiles: it grows with the full and partial waves of 128 x 256 tiles
over the GPU's processors, plus a start-up along the inner dimension, and is at least the time to load the
operands from memory. Attention has a separate efficiency. All other kernels are memory traffic.
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
    """Seconds of one layer's forward pass by kernel class, then of the backward pass in the same order."""

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
        """Seconds of the whole forward pass."""
        return self.matmul + self.experts + self.attention + self.elementwise

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass, without recomputation."""
        return (
            self.matmul_backward + self.experts_backward + self.attention_backward + self.elementwise_backward
        )


class Kernels:
    """Kernel times of one framework on one GPU at one precision."""

    def __init__(
        self, gpu: Gpu, framework: str, precision: str, constants: Constants, frozen: bool = False
    ) -> None:
        self.learning = 0.0 if frozen else 1.0  # 1 if weight gradients are computed, else 0
        self.framework = FRAMEWORKS[framework]
        self.adapters = frozen and self.framework.eager
        self.eight_bit = precision in {"fp8", "fp4"} and gpu.fp8_tflops > 0
        of = constants.of
        variants = self.framework.variants
        framework = self.framework.family
        bf16 = gpu.matmul_tflops * of("matmul", *gpu.variants)
        rate = bf16
        if precision == "fp32":
            rate *= of("fp32_share", *gpu.variants)
        self.attention_rate = (
            gpu.matmul_tflops
            * 1e12
            * of("attention", *gpu.variants)
            * self._attention_software(gpu, constants)
        )
        if self.eight_bit:
            rate = gpu.matmul_fp8_tflops * of("matmul_fp8", *gpu.variants)
            rate *= of("matmul_fp4_gain", *gpu.variants) if precision == "fp4" else 1.0
        self.dense_rate = bf16 * 1e12
        self.rate = rate * 1e12
        self.hbm = gpu.hbm_gbs * 1e9 * of("hbm_efficiency", gpu.vendor)
        self.sms = gpu.sms
        self.tail = constants["gemm_tail_waves"]
        self.ramp = constants["gemm_ramp_k"]
        self.unaligned = constants["unaligned_slowdown"]
        self.odd = constants["odd_slowdown"]
        self.gap = constants["kernel_gap_us"] * 1e-6
        self.expert_ramp = of("expert_ramp_ffn", *variants)
        self.expert_gap = of("expert_gap_us", *variants) * 1e-6
        self.traffic = of("elementwise", *variants)
        # seconds of a layer's small kernels, per pass
        self.small = of("elementwise_floor_us", framework) * 1e-6
        self.attention_ramp = constants["attention_ramp_s"]
        self.scores = constants["scores_traffic"]
        self.cast = constants["fp8_cast_bytes"] if self.eight_bit else 0.0

    def _attention_software(self, gpu: Gpu, constants: Constants) -> float:
        """Return the speed of the framework's attention kernels, relative to the vendor's on the same chip.

        FlashAttention-2, PyTorch's kernel, reaches 50 to 73 % of A100's peak (arXiv:2307.08691), and no
        faster kernel is known there. On H100 it reaches 35 %, and kernels that use Hopper's instructions
        reach 75 % (arXiv:2407.08608). Frameworks with a slower kernel have their own constant.
        """
        framework = self.framework
        if framework.attention_kernels == "pytorch" and not gpu.has_newer_attention:
            return constants.values.get(f"attention_software/{framework.name}", 1.0)
        return constants.of("attention_software", *framework.variants, framework.attention_kernels)

    def gemm(self, m: float, n: float, k: float, *, wide: bool = False, batch: int = 1) -> float:
        """Return the time of ``batch`` products of m x k by k x n; ``wide`` products use 16 bits."""
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        tiles = batch * math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
        ideal_tiles = batch * m * n / (TILE_M * TILE_N)
        slowdown = (tiles + self.tail * self.sms) / ideal_tiles * (1 + self.ramp / k)
        if n % 8 or k % 8:  # unaligned rows: tensor cores cannot load them whole
            slowdown *= self.odd
        elif n % 64 or k % 64:  # rows that do not start at 128-byte lines
            slowdown *= self.unaligned
        flops = 2.0 * batch * m * n * k
        rate = self.dense_rate if wide else self.rate
        bytes_moved = batch * (m * k + k * n + m * n) * (2.0 if wide or not self.eight_bit else 1.4)
        return max(flops * slowdown / rate, bytes_moved / self.hbm) + self.gap

    def pair(self, m: float, gemm: Gemm, tp: int) -> tuple[float, float]:
        """Return forward and backward time of one of the model's products, split by tensor parallelism."""
        n = gemm.n / tp if gemm.split == "n" else gemm.n
        k = gemm.k / tp if gemm.split == "k" else gemm.k
        if gemm.name == "router":
            time = self.gemm(m, n, k, wide=True)
            return time, (1 + self.learning) * time
        return self.gemm(m, n, k), self.gemm(m, k, n) + self.learning * self.gemm(n, k, m)

    def attend(self, stack: Stack, tokens: float, seq_len: int, layout: Layout) -> tuple[float, float]:
        """Return forward and backward time of attention: scores, softmax, and product with the values."""
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
        if att.head_dim % 8:  # as in gemm: tensor cores cannot load such rows whole
            time *= self.odd
        time += self.scores * tokens * span * att.heads / layout.tp / self.hbm
        return time, 2.0 * time

    def layer(self, stack: Stack, hidden_size: int, seq_len: int, layout: Layout) -> LayerCost:
        """Return the kernel times of one layer for one micro-batch."""
        tokens = layout.mbs * seq_len / layout.cp
        tp = layout.tp
        matmul = matmul_backward = 0.0
        for gemm in (*stack.attention_gemms(hidden_size), *stack.mlp_gemms(hidden_size)):
            forward, backward = self.pair(tokens, gemm, tp)
            matmul += forward
            matmul_backward += backward
        attention, attention_backward = self.attend(stack, tokens, seq_len, layout)
        if stack.cross:
            attention, attention_backward = 2 * attention, 2 * attention_backward
        experts, experts_backward = self.experts(stack, hidden_size, tokens, layout)
        bytes_moved = tokens * self.elementwise_bytes(stack, hidden_size, layout)
        elementwise = bytes_moved * self.traffic / self.hbm + self.small
        adapters, adapters_backward = self._adapter_times(stack, hidden_size, tokens / tp)
        return LayerCost(
            matmul,
            experts,
            attention,
            elementwise + adapters,
            matmul_backward,
            experts_backward,
            attention_backward,
            2 * elementwise + adapters_backward,
        )

    def _adapter_times(self, stack: Stack, hidden_size: int, tokens: float) -> tuple[float, float]:
        """Return forward and backward time of the adapters (LoRA) beside the frozen products of a layer.

        An adapter's two products are so narrow that they cost their memory traffic. As sequences of PyTorch
        operators (PEFT's lora.Linear), a dropout, both products, a scale and a sum read and write 7 bytes of
        each input and 12 of each result of the frozen product; their backward pass 15 and 8. Frameworks with
        fused kernels or a compiler drop most of it.
        """
        if not self.adapters:
            return 0.0, 0.0
        gemms = (*stack.attention_gemms(hidden_size), *stack.mlp_gemms(hidden_size))
        inputs, results = sum(gemm.k for gemm in gemms), sum(gemm.n for gemm in gemms)
        per_byte = tokens / self.hbm
        return (7 * inputs + 12 * results) * per_byte, (15 * inputs + 8 * results) * per_byte

    def experts(self, stack: Stack, hidden_size: int, tokens: float, layout: Layout) -> tuple[float, float]:
        """Return forward and backward time of the routed experts' products, with balanced routing."""
        if not stack.experts:
            return 0.0, 0.0
        local_experts = max(1, stack.experts.count // layout.ep)
        routed_tokens = tokens * stack.experts.top_k * layout.expert_tp / layout.tp
        ffn = stack.experts.ffn / layout.expert_tp
        expert_tokens = routed_tokens / local_experts
        up_columns = ffn * (2 if stack.gated else 1)
        forward = self.gemm(expert_tokens, up_columns, hidden_size, batch=local_experts) + self.gemm(
            expert_tokens, hidden_size, ffn, batch=local_experts
        )
        backward = self.gemm(expert_tokens, hidden_size, up_columns, batch=local_experts) + self.gemm(
            expert_tokens, ffn, hidden_size, batch=local_experts
        )
        backward += self.learning * (
            self.gemm(up_columns, hidden_size, expert_tokens, batch=local_experts)
            + self.gemm(hidden_size, ffn, expert_tokens, batch=local_experts)
        )
        gap_time = local_experts * self.expert_gap
        # grouped narrow products are slower than a plain product
        grouping_factor = 1 + self.expert_ramp / ffn
        return forward * grouping_factor + 2 * gap_time, backward * grouping_factor + 4 * gap_time

    def elementwise_bytes(self, stack: Stack, hidden_size: int, layout: Layout) -> float:
        """Return the bytes per token that fused kernels other than matrix products read and write.

        A norm reads and writes once, a residual addition reads two tensors and writes one, an activation
        function reads its inputs and writes its output. Rotary embedding reads and writes queries and keys.
        Routing copies each token to its experts and back. Without ``--moe-permute-fusion``, which is off by
        default in Megatron-LM, separate operators sort the copies, weight them in 32 bits and sum them: 30
        bytes instead of a fused kernel's 12.
        """
        att, tp = stack.attention, layout.tp
        sequence_shards = tp if layout.sp else 1
        total_bytes = (4.0 * stack.norms + 6.0 * 2) * hidden_size / sequence_shards
        total_bytes += 4.0 * (att.heads + att.kv_heads) * att.head_dim / tp
        width = stack.ffn if not stack.experts else stack.experts.shared_ffn
        tensors = 3 if stack.gated else 2
        total_bytes += 2.0 * tensors * width / tp
        if stack.experts:
            routed_copies = stack.experts.top_k * layout.expert_tp / tp
            routing_bytes = 30.0 if self.framework.plain_routing else 12.0
            total_bytes += routed_copies * (
                2.0 * tensors * stack.experts.ffn / layout.expert_tp + routing_bytes * hidden_size
            )
        if self.cast:
            total_bytes += self.cast * (2 * hidden_size + att.heads * att.value_dim + width) / tp
        return total_bytes

    def head(self, model: ModelShape, tokens: float, tp: int) -> tuple[float, float]:
        """Return forward and backward time of the output head and the loss."""
        if not model.head or not model.vocab:
            return 0.0, 0.0
        columns = model.vocab / tp
        if tp > 1 or self.framework.pads_vocab:
            columns = -(-model.vocab // (128 * tp)) * 128
        loss = 8.0 * tokens * columns / self.hbm
        forward = self.gemm(tokens, columns, model.hidden, wide=True)
        backward = self.gemm(tokens, model.hidden, columns, wide=True)
        backward += self.learning * self.gemm(columns, model.hidden, tokens, wide=True)
        return forward + loss, backward + loss
