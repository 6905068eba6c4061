"""Time of one optimizer step by term, in seconds.

Compute times come from :mod:`compute`, traffic from :mod:`collectives`. This module models their order: the
overlap of compute and traffic, the pipeline's fill, and the work per micro-batch and per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dtslurm.planner.collectives import Group, Network, group
from dtslurm.planner.compute import Kernels, LayerCost
from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import Stack
from dtslurm.planner.routing import Routing
from dtslurm.planner.setting import Setting

TERMS = (
    "matmul",
    "experts",
    "attention",
    "elementwise",
    "head",
    "recompute",
    "launch",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "fsdp_comm",
    "bubble",
    "pp_comm",
    "dp_comm",
    "optimizer",
    "jitter",
    "overhead",
)
COMMUNICATION = frozenset({"tp_comm", "cp_comm", "ep_comm", "fsdp_comm", "pp_comm", "dp_comm"})
HOST = frozenset({"launch", "overhead"})
PARTS = ("compute", "communication", "host")


def part_of(term: str) -> str:
    """Return the part of a step that a term belongs to; a calibration scales each part by one factor."""
    return "communication" if term in COMMUNICATION else "host" if term in HOST else "compute"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by term; each term is time on the critical path, so the terms add up."""

    terms: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.terms.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of computation, of exposed communication, and of waiting for the host."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for term, value in self.terms.items():
            seconds[part_of(term)] += value
        return seconds


class LayerTime(NamedTuple):
    """Forward and backward seconds of a layer including exposed traffic, and the terms of both passes."""

    forward: float
    backward: float
    terms: dict[str, float]


class Timer:
    """Computes step times of layouts of one model on one machine, with a cache of layer times."""

    def __init__(self, setting: Setting) -> None:
        machine, constants = setting.machine, setting.constants
        self.model = setting.model
        self.machine = machine
        self.seq_len = setting.seq_len
        self.framework = FRAMEWORKS[setting.framework]
        if setting.dispatches_once:
            self.framework = replace(self.framework, once_per_node=True)
        framework = self.framework.family
        self.frozen = setting.frozen
        self.graphs = setting.graphs or (machine.gpu.grace and self.framework.graphs)
        self.kernels = Kernels(machine.gpu, setting.framework, setting.precision, constants, setting.frozen)
        self.network = Network(machine, self.framework.variants, constants)
        self.routing = Routing(machine, self.network, self.framework, constants, even=setting.even)
        self.constants = constants
        of = constants.of
        self.host_backward = of("host_backward", framework)
        self.blend = of("host_blend", framework)
        self.bucket = of("bucket_mib", framework) * 1024**2
        self.tp_hidden = of("tp_overlap", *self.framework.variants)
        self.dp_hidden = of("dp_overlap", framework) if self.framework.overlap else 0.0
        self.slowdown = of("overlap_slowdown", framework)
        self.pp_exposed = of("pp_exposed", framework)
        self.jitter = of("jitter_per_doubling", machine.fabric)
        self.overhead = of("step_overhead_ms", framework) * 1e-3
        self.scales = {term: constants[f"{part_of(term)}_scale"] for term in TERMS}
        self.rails = of("zero3_rails", framework)
        self._cached_layers: dict[tuple[object, ...], list[LayerTime]] = {}

    def layers(self, layout: Layout) -> list[LayerTime]:
        """Return the time of each stack's layer for one micro-batch."""
        shards = layout.shards if layout.gathers else 0
        key = (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, layout.recompute, layout.sp, shards,
            layout.dp if layout.ep > 1 or shards else 0, layout.ep > 1 and layout.vp > 1,
        )  # fmt: skip
        layer_times = self._cached_layers.get(key)
        if layer_times is None:
            layer_times = self._cached_layers[key] = [
                self._layer_time(stack, layout) for stack in self.model.stacks
            ]
        return layer_times

    def _layer_time(self, stack: Stack, layout: Layout) -> LayerTime:
        cost = self.kernels.layer(stack, self.model.hidden, self.seq_len, layout)
        cost = self.routing.busiest(stack, layout, cost)
        tp_comm = self._tensor_parallel_time(stack, layout)
        cp_forward, cp_backward = self._context_parallel_time(stack, layout, cost)
        ep_comm, ep_backward = self.routing.exchange(stack, layout, self.model.hidden, self.seq_len, cost)
        recompute = {
            "none": 0.0,
            "selective": self._selective_recompute_time(cost),
            "mlp": _mlp_time(stack, self.model.hidden, cost),
            "full": cost.forward,
        }[layout.recompute]
        repeated_share = _repeated_share(stack, layout)
        tp_recompute = tp_comm * repeated_share
        ep_recompute = ep_comm if layout.recompute == "full" else 0.0
        forward = cost.forward + tp_comm + cp_forward + ep_comm
        backward = (
            cost.backward + recompute + tp_comm + tp_recompute + cp_backward + ep_backward + ep_recompute
        )
        host_forward = self._launch_time(stack, layout)
        blend = self.blend
        idle_forward = (host_forward**blend + forward**blend) ** (1 / blend) - forward
        host_backward = host_forward * (self.host_backward + repeated_share)
        idle_backward = (host_backward**blend + backward**blend) ** (1 / blend) - backward
        fsdp_forward, fsdp_backward = self._sharded_weight_time(
            stack, layout, forward + idle_forward, backward + idle_backward
        )
        terms = {
            "matmul": cost.matmul + cost.matmul_backward,
            "experts": cost.experts + cost.experts_backward,
            "attention": cost.attention + cost.attention_backward,
            "elementwise": cost.elementwise + cost.elementwise_backward,
            "recompute": recompute + tp_recompute + ep_recompute,
            "launch": idle_forward + idle_backward,
            "tp_comm": 2 * tp_comm,
            "cp_comm": cp_forward + cp_backward,
            "ep_comm": ep_comm + ep_backward,
            "fsdp_comm": fsdp_forward + fsdp_backward,
        }
        return LayerTime(
            forward + idle_forward + fsdp_forward, backward + idle_backward + fsdp_backward, terms
        )

    def _launch_time(self, stack: Stack, layout: Layout) -> float:
        """Return the seconds in which the host launches the kernels of one layer's forward pass.

        One thread launches all kernels, and Grace's cores are slower at this than x86 servers' cores
        (arXiv:2504.11750: GH200 stays bound by its host up to four times the batch). NVIDIA's recipes
        therefore replay CUDA graphs on Grace; for models with narrow experts, the graphs exclude the experts
        (NVIDIA/NeMo, scripts/performance/recommended_model_configs: cuda_graphs is 1 for dense models and
        Mixtral on GB200, 0 for DeepSeek-V3 and on H100; Megatron-LM, docs/discussions/
        deepseek-v3-gb200-optimization).

        DeepSpeed's ZeRO-3 runs Python hooks before and after each module that has weights, about a dozen in a
        layer: they find, gather, await and release the module's weights (deepspeed/runtime/zero/
        parameter_offload.py and partitioned_param_coordinator.py). FSDP has hooks for a layer as a whole.
        """
        of = self.constants.of
        framework = self.framework
        host = of("host_layer_us", framework.family)
        if layout.gathers:
            # Adapters are modules with weights of their own: they double the number of hooks.
            host += of("host_zero3_us", framework.family) * (2 if self.kernels.adapters else 1)
        if layout.tp > 1:
            host += of("host_tp_us", framework.family)
        if not framework.flash and stack.attention.heads // layout.tp * layout.mbs % 4:
            # Megatron-LM's fused softmax needs a multiple of 4 heads: fused_softmax.py
            host += self.constants["host_softmax_us"]
        if stack.attention.kv_rank:
            host += self.constants["host_mla_us"]
        if self.kernels.adapters:
            host += self.constants["host_adapters_us"]
        is_grace = self.machine.gpu.grace
        graph_factor = self.constants["host_graphed"] if self.graphs else 1.0
        has_wide_experts = not stack.experts or stack.experts.ffn > self.model.hidden
        if has_wide_experts or framework.once_per_node:
            host *= graph_factor
        if stack.experts:
            host += of("host_moe_us", *framework.variants) * (graph_factor if has_wide_experts else 1.0)
        return host * 1e-6 * (self.constants["host_slowness_grace"] if is_grace else 1.0)

    def _selective_recompute_time(self, cost: LayerCost) -> float:
        """Return the seconds of selective recomputation.

        Without flash attention, the attention core runs again; with it, half of the elementwise kernels.
        torchtitan's per-operator policy recomputes every second matrix product and all elementwise kernels.
        """
        if self.framework.family == "torchtitan":
            return cost.elementwise + (cost.matmul + cost.experts) / 2
        return cost.elementwise / 2 if self.framework.flash else cost.attention

    def _tensor_parallel_time(self, stack: Stack, layout: Layout) -> float:
        """Return the exposed tensor-parallel time of one pass: per block an all-reduce, or its two halves."""
        if layout.tp == 1:
            return 0.0
        tensor_group = group(self.machine, layout.tp, 1)
        nbytes = 2.0 * layout.mbs * self.seq_len / layout.cp * self.model.hidden
        blocks = 3 if stack.cross else 2
        if stack.experts and layout.ep > 1 and not stack.experts.shared_ffn:
            blocks -= 1
        block_time = (
            2 * self.network.gather(nbytes, tensor_group)
            if layout.sp
            else self.network.reduce(nbytes, tensor_group)
        )
        hidden = self.tp_hidden if tensor_group.across == 1 else 0.0
        return blocks * block_time * (1 - hidden)

    def _context_parallel_time(self, stack: Stack, layout: Layout, cost: LayerCost) -> tuple[float, float]:
        """Return the exposed time of exchanging keys and values between ranks, forward and backward."""
        if layout.cp == 1:
            return 0.0, 0.0
        att = stack.attention
        context_group = group(self.machine, layout.cp, layout.tp)
        tokens = layout.mbs * self.seq_len / layout.cp
        kv_width = (
            att.kv_rank + att.rope_dim if att.kv_rank else att.kv_heads * (att.head_dim + att.value_dim)
        )
        nbytes = 2.0 * tokens * kv_width / (1 if att.kv_rank else layout.tp)
        hop = self.network.send(nbytes, across=context_group.across > 1)
        forward = (layout.cp - 1) * hop
        backward = 2 * forward
        share = (layout.cp - 1) / layout.cp
        return max(0.0, forward - share * cost.attention), max(
            0.0, backward - share * cost.attention_backward
        )

    def _sharded_weight_time(
        self, stack: Stack, layout: Layout, ahead: float, back: float
    ) -> tuple[float, float]:
        """Return the added seconds of fully sharded weights: gathers before both passes, a scatter after."""
        if not layout.gathers or layout.shards == 1:
            return 0.0, 0.0
        shard_group = group(self.machine, layout.shards, layout.tp)
        weights = 2.0 * stack.dense_params(self.model.hidden) / layout.tp
        gather = self.network.gather(weights, shard_group, rails=self.rails)
        if stack.experts:
            expert_ranks = layout.expert_ranks
            local = 2.0 * stack.experts.count * stack.expert_params(self.model.hidden) / expert_ranks
            expert_shards = max(1, layout.shards * layout.tp // expert_ranks)
            gather += self.network.gather(local, group(self.machine, expert_shards, expert_ranks))
        grad = 0.0 if self.frozen else self.constants.of("fsdp_grad_share", self.framework.family)
        traffic_forward, traffic_backward = gather, gather * (1 + grad)
        slowdown = self.slowdown
        return (
            max(0.0, traffic_forward - ahead) + slowdown * min(traffic_forward, ahead),
            max(0.0, traffic_backward - back) + slowdown * min(traffic_backward, back),
        )

    def step(self, layout: Layout) -> StepTime:
        """Return the time of one step."""
        if self.model.generic:
            return self._generic_step(layout)
        micro_batches, stages = layout.micro_batches, layout.pp
        tokens = layout.mbs * self.seq_len / layout.cp
        times = self.layers(layout)
        terms = dict.fromkeys(TERMS, 0.0)
        forward = backward = 0.0
        for stack, time in zip(self.model.stacks, times, strict=True):
            forward += stack.count * time.forward
            backward += stack.count * time.backward
            for key, value in time.terms.items():
                terms[key] += value * stack.count * micro_batches / stages
        head_forward, head_backward = self.kernels.head(self.model, tokens, layout.tp)
        head = head_forward + head_backward
        terms["head"] = head * micro_batches / stages
        layer = (forward + backward) / self.model.layers
        self._add_pipeline_terms(terms, layout, layer, head)
        window = ((backward / stages + head_backward / stages), (forward / stages + head_forward / stages))
        if not self.frozen:
            terms["dp_comm"] = self._data_parallel_time(layout, window)
            terms["optimizer"] = self._optimizer_time(layout)
        terms["overhead"] = self.overhead
        doublings = max(0, (layout.gpus // self.machine.gpus_per_node).bit_length() - 1)
        terms["jitter"] = self.jitter * doublings * sum(terms.values())
        return StepTime({name: value * self.scales[name] for name, value in terms.items()})

    def _add_pipeline_terms(self, terms: dict[str, float], layout: Layout, layer: float, head: float) -> None:
        """Set the terms of the pipeline bubble, including unequal stages, and of point-to-point traffic."""
        stages, micro_batches, layers = layout.pp, layout.micro_batches, self.model.layers
        if stages == 1:
            return
        average = (layers * layer + head) / stages
        if self.framework.balanced:
            slowest = min(
                max(stage_layers * layer + head, -(-(layers - stage_layers) // (stages - 1)) * layer)
                for stage_layers in range(layers // stages + 1)
            )
        elif layers % stages == 0:
            slowest = layers / stages * layer + head
        elif (layers + 2) % stages == 0:
            slowest = max((layers + 2) / stages * layer, ((layers + 2) / stages - 1) * layer + head)
        else:
            slowest = max(-(-layers // stages) * layer, layers // stages * layer + head)
        # time of the first micro-batch in the other stages
        fill = max(0.0, stages * average - slowest) / layout.vp
        ideal = micro_batches * average
        if layout.schedule == "zb1p":
            fill /= 3  # B/3 of 1F1B's bubble, arXiv:2401.10241
        elif layout.schedule == "zbv":
            fill = 0.0
        terms["bubble"] = micro_batches * slowest - ideal + fill
        stage_gpus = layout.gpus // stages
        nbytes = (
            2.0 * layout.mbs * self.seq_len / layout.cp * self.model.hidden / (layout.tp if layout.sp else 1)
        )
        hop = self.network.send(nbytes, across=stage_gpus >= self.machine.domain)
        terms["pp_comm"] = hop * (2 * (stages - 1) + 2 * micro_batches * layout.vp * self.pp_exposed)

    def _local_params(self, layout: Layout) -> tuple[float, float]:
        """Return the number of dense and of expert parameters on one GPU."""
        model = self.model
        table_params = model.embedding_params + model.head_params + model.positions + model.extra_params
        end_stages = 1 if layout.pp == 1 else 2
        dense = (model.layer_params - model.expert_params) / layout.pp + table_params / end_stages
        return dense / layout.tp, model.expert_params / layout.pp / layout.expert_ranks

    def _data_parallel_time(self, layout: Layout, window: tuple[float, float]) -> float:
        """Return the exposed seconds per step of gradient and weight traffic among data parallel ranks."""
        ranks = layout.dp * layout.cp
        if ranks == 1:
            return 0.0
        dense, experts = self._local_params(layout)
        shards = layout.shards
        grad = self.constants.of("grad_bytes", self.framework.family)
        expert_shards = max(1, ranks * layout.tp // layout.expert_ranks)
        expert_group = group(self.machine, expert_shards, layout.expert_ranks)
        if layout.gathers:
            replica_group = Group(1, ranks // shards) if shards * layout.tp >= self.machine.domain else None
            if ranks == shards:
                return 0.0
            replica_group = replica_group or group(self.machine, ranks // shards, layout.tp * shards)
            # FSDP reduces a layer's gradients among the copies while it computes the next layer's
            # (torch/distributed/fsdp/_runtime_utils.py, _reduce_grad); the last layer's time is exposed.
            cost = self.network.reduce(grad * dense / shards, replica_group)
            last = cost / self.model.layers
            return last + max(0.0, cost - last - window[0]) + self.slowdown * min(cost - last, window[0])
        shard_group = group(self.machine, shards, layout.tp)
        all_ranks = group(self.machine, ranks, layout.tp)
        if layout.zero == 0:
            gradient_time = self._bucketed_time(self.network.reduce, grad * dense, all_ranks)
            gradient_time += self._bucketed_time(self.network.reduce, grad * experts, expert_group)
            weight_time = 0.0
        else:
            gather = self.network.gather
            gradient_time = self._bucketed_time(gather, grad * dense, shard_group) + self._bucketed_time(
                gather, grad * experts, expert_group
            )
            if shards < ranks:
                replica_group = group(self.machine, ranks // shards, layout.tp * shards)
                gradient_time += self.network.reduce(grad * dense / shards, replica_group)
            weight_time = self._bucketed_time(gather, 2 * dense, shard_group) + self._bucketed_time(
                gather, 2 * experts, expert_group
            )
            if layout.zero == 2:
                gradient_time *= layout.micro_batches
        layers = max(1.0, self.model.layers / layout.pp)
        hidden = self.dp_hidden * (1 - 1 / layers)
        window_back = window[0] * (layout.micro_batches if layout.zero == 2 else 1)
        exposed = (
            gradient_time
            - min(gradient_time, window_back) * hidden
            + weight_time
            - min(weight_time, window[1]) * hidden
        )
        return exposed + self.slowdown * hidden * (
            min(gradient_time, window_back) + min(weight_time, window[1])
        )

    def _bucketed_time(
        self, collective: Callable[[float, Group], float], nbytes: float, ranks: Group
    ) -> float:
        """Return the time of a collective split into buckets, each with its own latency."""
        calls = max(1, round(nbytes / self.bucket))
        return calls * collective(nbytes / calls, ranks)

    def _optimizer_time(self, layout: Layout) -> float:
        """Return the time of Adam's update: 42 bytes read and written per parameter."""
        dense, experts = self._local_params(layout)
        shards = layout.shards if layout.zero else 1
        expert_shards = max(1, shards * layout.tp // layout.expert_ranks) if layout.zero else 1
        updated_params = dense / shards + experts / expert_shards
        if layout.offload:
            return updated_params * 42 / (self.constants["offload_gbs"] * 1e9)
        return updated_params * 42 / self.kernels.hbm

    def _generic_step(self, layout: Layout) -> StepTime:
        """Return the step time of a model given only by its totals: compute, gradients and optimizer."""
        generic = self.model.generic
        assert generic is not None  # noqa: S101 - checked by the caller
        terms = dict.fromkeys(TERMS, 0.0)
        rate = self.kernels.dense_rate * self.constants["generic_share"]
        samples = layout.mbs * layout.micro_batches
        forward = generic.forward_flops * samples / rate
        traffic = 3 * generic.activation_bytes * samples / self.kernels.hbm
        recompute = {"none": 0.0, "full": 1.0}.get(layout.recompute, 0.3) * forward
        terms["matmul"] = 3 * forward
        terms["elementwise"] = traffic
        terms["recompute"] = recompute
        ranks = group(self.machine, layout.dp, 1)
        grad = self.constants.of("grad_bytes", self.framework.family)
        cost = self.network.reduce(grad * generic.params, ranks) if layout.dp > 1 else 0.0
        terms["dp_comm"] = max(0.1 * cost, cost - self.dp_hidden * 2 * forward / layout.micro_batches)
        shards = layout.shards if layout.zero else 1
        terms["optimizer"] = generic.params / shards * 42 / self.kernels.hbm
        terms["overhead"] = self.overhead
        return StepTime({name: value * self.scales[name] for name, value in terms.items()})


def _repeated_share(stack: Stack, layout: Layout) -> float:
    """Return the share of a layer's launches and collectives that recomputation repeats."""
    if layout.recompute == "mlp" and not stack.experts:
        return 0.5
    return 1.0 if layout.recompute == "full" else 0.0


def _mlp_time(stack: Stack, hidden_size: int, cost: LayerCost) -> float:
    """Return the seconds of the forward pass of a dense layer's MLP; 0 for experts."""
    if stack.experts:
        return 0.0
    mlp, attention = (
        sum(gemm.n * gemm.k for gemm in gemms)
        for gemms in (stack.mlp_gemms(hidden_size), stack.attention_gemms(hidden_size))
    )
    return cost.matmul * mlp / (mlp + attention) + cost.elementwise / 2
