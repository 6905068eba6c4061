"""Time of one optimizer step, term by term, seconds.

Compute comes from :mod:`compute`, traffic from :mod:`collectives`; this file knows how they are ordered: what
hides behind what, how a pipeline fills, what happens once per micro-batch and what once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dtslurm.planner.collectives import Group, Network, group
from dtslurm.planner.compute import Kernels, LayerCost
from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import ModelShape, Stack
from dtslurm.planner.routing import Routing

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


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by term; every term is time on the critical path, so they add up."""

    terms: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.terms.values())


class LayerTime(NamedTuple):
    """One layer's forward and backward time with its exposed traffic, and the terms of both together."""

    forward: float
    backward: float
    terms: dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What all layouts of a search have in common.

    Attributes:
        seq_len: in tokens.
        frozen: the weights stay as they are and small adapters beside them learn (LoRA).
        even: tokens are routed to experts evenly (see :mod:`routing`).
    """

    model: ModelShape
    machine: Machine
    seq_len: int
    framework: str
    precision: str
    constants: Constants
    frozen: bool = False
    even: bool = False


class Timer:
    """Times layouts of one model on one machine; remembers layers it has seen."""

    def __init__(self, setting: Setting) -> None:
        machine, constants = setting.machine, setting.constants
        self.model = setting.model
        self.machine = machine
        self.seq_len = setting.seq_len
        self.framework = FRAMEWORKS[setting.framework]
        framework = self.framework.family
        self.frozen = setting.frozen
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
        self.scale = constants["time_scale"]
        self.rails = of("zero3_rails", framework)
        self._layers: dict[tuple[object, ...], list[LayerTime]] = {}

    def layers(self, layout: Layout) -> list[LayerTime]:
        """Return the time of each stack's layer for one micro-batch."""
        shards = layout.shards if layout.gathers else 0
        key = (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, layout.recompute, layout.sp, shards,
            layout.dp if layout.ep > 1 or shards else 0, layout.ep > 1 and layout.vp > 1,
        )  # fmt: skip
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = [self._layer(stack, layout) for stack in self.model.stacks]
        return found

    def _layer(self, stack: Stack, layout: Layout) -> LayerTime:
        cost = self.kernels.layer(stack, self.model.hidden, self.seq_len, layout)
        cost = self.routing.busiest(stack, layout, cost)
        tp_comm = self._tensor(stack, layout)
        cp_ahead, cp_back = self._context(stack, layout, cost)
        ep_comm, ep_back = self.routing.exchange(stack, layout, self.model.hidden, self.seq_len, cost)
        again = {
            "none": 0.0,
            "selective": self._selective(cost),
            "full": cost.forward,
        }[layout.recompute]
        tp_again = tp_comm if layout.recompute == "full" else 0.0
        ep_again = ep_comm if layout.recompute == "full" else 0.0
        ahead = cost.forward + tp_comm + cp_ahead + ep_comm
        back = cost.backward + again + tp_comm + tp_again + cp_back + ep_back + ep_again
        host = self._host(stack, layout)
        blend = self.blend
        idle_ahead = (host**blend + ahead**blend) ** (1 / blend) - ahead
        host_back = host * self.host_backward + (host if layout.recompute == "full" else 0.0)
        idle_back = (host_back**blend + back**blend) ** (1 / blend) - back
        fsdp_ahead, fsdp_back = self._sharded(stack, layout, ahead + idle_ahead, back + idle_back)
        terms = {
            "matmul": cost.matmul + cost.matmul_backward,
            "experts": cost.experts + cost.experts_backward,
            "attention": cost.attention + cost.attention_backward,
            "elementwise": cost.elementwise + cost.elementwise_backward,
            "recompute": again + tp_again + ep_again,
            "launch": idle_ahead + idle_back,
            "tp_comm": 2 * tp_comm,
            "cp_comm": cp_ahead + cp_back,
            "ep_comm": ep_comm + ep_back,
            "fsdp_comm": fsdp_ahead + fsdp_back,
        }
        return LayerTime(ahead + idle_ahead + fsdp_ahead, back + idle_back + fsdp_back, terms)

    def _host(self, stack: Stack, layout: Layout) -> float:
        """Return the time in which the host launches one layer's forward pass.

        Launching is one thread's work, and Grace's cores are slower at it than x86 servers'
        (arXiv:2504.11750: GH200 stays bound by its host up to four times the batch). Recipes of NVIDIA's
        tables therefore replay CUDA graphs there, of narrow experts' mixtures all but the experts
        (NVIDIA/NeMo, scripts/performance/recommended_model_configs: cuda_graphs is 1 for dense models and
        Mixtral on GB200, 0 for DeepSeek-V3 and on H100; Megatron-LM, docs/discussions/
        deepseek-v3-gb200-optimization).
        """
        of = self.constants.of
        framework = self.framework
        host = of("host_layer_us", framework.family)
        if layout.tp > 1:
            host += of("host_tp_us", framework.family)
        if not framework.flash and stack.attention.heads // layout.tp * layout.mbs % 4:
            # Megatron-LM's fused softmax wants 4 heads at a time: fused_softmax.py
            host += self.constants["host_softmax_us"]
        if stack.attention.kv_rank:
            host += self.constants["host_mla_us"]
        grace = self.machine.gpu.grace
        graphed = self.constants["host_graphed"] if grace and framework.graphs else 1.0
        wide = not stack.experts or stack.experts.ffn > self.model.hidden
        if wide or framework.once_per_node:
            host *= graphed
        if stack.experts:
            host += of("host_moe_us", *framework.variants) * (graphed if wide else 1.0)
        return host * 1e-6 * (self.constants["host_slowness_grace"] if grace else 1.0)

    def _selective(self, cost: LayerCost) -> float:
        """Return what selective recomputation runs again: attention's core where it stores the scores; in
        torchtitan every second matrix product and all that is elementwise (its per-operator policy)."""
        if self.framework.family == "torchtitan":
            return cost.elementwise + (cost.matmul + cost.experts) / 2
        return cost.elementwise / 2 if self.framework.flash else cost.attention

    def _tensor(self, stack: Stack, layout: Layout) -> float:
        """Return exposed tensor-parallel traffic of one pass: an all-reduce, or its two halves, per block."""
        if layout.tp == 1:
            return 0.0
        ranks = group(self.machine, layout.tp, 1)
        nbytes = 2.0 * layout.mbs * self.seq_len / layout.cp * self.model.hidden
        blocks = 3 if stack.cross else 2
        if stack.experts and layout.ep > 1 and not stack.experts.shared_ffn:
            blocks -= 1
        both = 2 * self.network.gather(nbytes, ranks) if layout.sp else self.network.reduce(nbytes, ranks)
        hidden = self.tp_hidden if ranks.across == 1 else 0.0
        return blocks * both * (1 - hidden)

    def _context(self, stack: Stack, layout: Layout, cost: LayerCost) -> tuple[float, float]:
        """Return what attention does not hide of passing keys and values around, forward and backward."""
        if layout.cp == 1:
            return 0.0, 0.0
        att = stack.attention
        ranks = group(self.machine, layout.cp, layout.tp)
        tokens = layout.mbs * self.seq_len / layout.cp
        widths = att.kv_rank + att.rope_dim if att.kv_rank else att.kv_heads * (att.head_dim + att.value_dim)
        nbytes = 2.0 * tokens * widths / (1 if att.kv_rank else layout.tp)
        hop = self.network.send(nbytes, across=ranks.across > 1)
        ahead = (layout.cp - 1) * hop
        back = 2 * ahead
        share = (layout.cp - 1) / layout.cp
        return max(0.0, ahead - share * cost.attention), max(0.0, back - share * cost.attention_backward)

    def _sharded(self, stack: Stack, layout: Layout, ahead: float, back: float) -> tuple[float, float]:
        """Return what fully sharded weights add to a layer: gathers before both passes, a scatter after."""
        if not layout.gathers or layout.shards == 1:
            return 0.0, 0.0
        ranks = group(self.machine, layout.shards, layout.tp)
        weights = 2.0 * stack.dense_params(self.model.hidden) / layout.tp
        gather = self.network.gather(weights, ranks, rails=self.rails)
        if stack.experts:
            split = layout.expert_ranks
            local = 2.0 * stack.experts.count * stack.expert_params(self.model.hidden) / split
            few = max(1, layout.shards * layout.tp // split)
            gather += self.network.gather(local, group(self.machine, few, split))
        grad = self.constants.of("fsdp_grad_share", self.framework.family)
        busy_ahead, busy_back = gather, gather * (1 + grad)
        slow = self.slowdown
        return (
            max(0.0, busy_ahead - ahead) + slow * min(busy_ahead, ahead),
            max(0.0, busy_back - back) + slow * min(busy_back, back),
        )

    def step(self, layout: Layout) -> StepTime:
        """Return the time of one step."""
        if self.model.generic:
            return self._generic(layout)
        m, p = layout.micro_batches, layout.pp
        tokens = layout.mbs * self.seq_len / layout.cp
        times = self.layers(layout)
        terms = dict.fromkeys(TERMS, 0.0)
        ahead = back = 0.0
        for stack, time in zip(self.model.stacks, times, strict=True):
            ahead += stack.count * time.forward
            back += stack.count * time.backward
            for key, value in time.terms.items():
                terms[key] += value * stack.count * m / p
        head_ahead, head_back = self.kernels.head(self.model, tokens, layout.tp)
        head = head_ahead + head_back
        terms["head"] = head * m / p
        layer = (ahead + back) / self.model.layers
        self._pipeline(terms, layout, layer, head)
        window = ((back / p + head_back / p), (ahead / p + head_ahead / p))
        if not self.frozen:
            terms["dp_comm"] = self._data(layout, window)
            terms["optimizer"] = self._optimizer(layout)
        terms["overhead"] = self.overhead
        doublings = max(0, (layout.gpus // self.machine.gpus_per_node).bit_length() - 1)
        terms["jitter"] = self.jitter * doublings * sum(terms.values())
        return StepTime({name: value * self.scale for name, value in terms.items()})

    def _pipeline(self, terms: dict[str, float], layout: Layout, layer: float, head: float) -> None:
        """Fill in the bubble, unequal stages with it, and point-to-point traffic."""
        p, m, layers = layout.pp, layout.micro_batches, self.model.layers
        if p == 1:
            return
        average = (layers * layer + head) / p
        if self.framework.balanced:
            slowest = min(
                max(k * layer + head, -(-(layers - k) // (p - 1)) * layer) for k in range(layers // p + 1)
            )
        elif layers % p == 0:
            slowest = layers / p * layer + head
        elif (layers + 2) % p == 0:
            slowest = max((layers + 2) / p * layer, ((layers + 2) / p - 1) * layer + head)
        else:
            slowest = max(-(-layers // p) * layer, layers // p * layer + head)
        fill = max(0.0, p * average - slowest) / layout.vp  # the first micro-batch's way through the others
        ideal = m * average
        if layout.schedule == "zb1p":
            fill /= 3  # B/3 of 1F1B's bubble, arXiv:2401.10241
        elif layout.schedule == "zbv":
            fill = 0.0
        terms["bubble"] = m * slowest - ideal + fill
        apart = layout.gpus // p
        nbytes = (
            2.0 * layout.mbs * self.seq_len / layout.cp * self.model.hidden / (layout.tp if layout.sp else 1)
        )
        hop = self.network.send(nbytes, across=apart >= self.machine.domain)
        terms["pp_comm"] = hop * (2 * (p - 1) + 2 * m * layout.vp * self.pp_exposed)

    def _local_params(self, layout: Layout) -> tuple[float, float]:
        """Return dense and expert parameters of one GPU's stage."""
        model = self.model
        tables = model.embedding_params + model.head_params + model.positions + model.extra_params
        ends = 1 if layout.pp == 1 else 2
        dense = (model.layer_params - model.expert_params) / layout.pp + tables / ends
        return dense / layout.tp, model.expert_params / layout.pp / layout.expert_ranks

    def _data(self, layout: Layout, window: tuple[float, float]) -> float:
        """Return exposed gradient and weight traffic of data parallel ranks, once a step."""
        ranks = layout.dp * layout.cp
        if ranks == 1:
            return 0.0
        dense, experts = self._local_params(layout)
        shards = layout.shards
        grad = self.constants.of("grad_bytes", self.framework.family)
        few = max(1, ranks * layout.tp // layout.expert_ranks)
        expert_ranks = group(self.machine, few, layout.expert_ranks)
        if layout.gathers:
            outside = Group(1, ranks // shards) if shards * layout.tp >= self.machine.domain else None
            if ranks == shards:
                return 0.0
            outside = outside or group(self.machine, ranks // shards, layout.tp * shards)
            cost = self.network.reduce(grad * dense / shards, outside)
            return max(cost * 0.1, cost - self.dp_hidden * window[0])
        inner = group(self.machine, shards, layout.tp)
        everyone = group(self.machine, ranks, layout.tp)
        if layout.zero == 0:
            down = self._calls(self.network.reduce, grad * dense, everyone)
            down += self._calls(self.network.reduce, grad * experts, expert_ranks)
            up = 0.0
        else:
            gather = self.network.gather
            down = self._calls(gather, grad * dense, inner) + self._calls(
                gather, grad * experts, expert_ranks
            )
            if shards < ranks:
                outside = group(self.machine, ranks // shards, layout.tp * shards)
                down += self.network.reduce(grad * dense / shards, outside)
            up = self._calls(gather, 2 * dense, inner) + self._calls(gather, 2 * experts, expert_ranks)
            if layout.zero == 2:
                down *= layout.micro_batches
        layers = max(1.0, self.model.layers / layout.pp)
        hidden = self.dp_hidden * (1 - 1 / layers)
        window_back = window[0] * (layout.micro_batches if layout.zero == 2 else 1)
        exposed = down - min(down, window_back) * hidden + up - min(up, window[1]) * hidden
        return exposed + self.slowdown * hidden * (min(down, window_back) + min(up, window[1]))

    def _calls(self, collective: Callable[[float, Group], float], nbytes: float, ranks: Group) -> float:
        """Return the time of a collective cut into buckets, each of which waits for the network anew."""
        calls = max(1, round(nbytes / self.bucket))
        return calls * collective(nbytes / calls, ranks)

    def _optimizer(self, layout: Layout) -> float:
        """Return the time Adam takes: 42 bytes read and written per parameter."""
        dense, experts = self._local_params(layout)
        shards = layout.shards if layout.zero else 1
        few = max(1, shards * layout.tp // layout.expert_ranks) if layout.zero else 1
        touched = dense / shards + experts / few
        if layout.offload:
            return touched * 42 / (self.constants["offload_gbs"] * 1e9)
        return touched * 42 / self.kernels.hbm

    def _generic(self, layout: Layout) -> StepTime:
        """Return the time of a step of a model known by its totals: compute, gradients, optimizer."""
        generic = self.model.generic
        assert generic is not None  # noqa: S101 - the caller looked
        terms = dict.fromkeys(TERMS, 0.0)
        rate = self.kernels.dense_rate * self.constants["generic_share"]
        samples = layout.mbs * layout.micro_batches
        ahead = generic.forward_flops * samples / rate
        traffic = 3 * generic.activation_bytes * samples / self.kernels.hbm
        again = {"none": 0.0, "selective": 0.3, "full": 1.0}[layout.recompute] * ahead
        terms["matmul"] = 3 * ahead
        terms["elementwise"] = traffic
        terms["recompute"] = again
        ranks = group(self.machine, layout.dp, 1)
        grad = self.constants.of("grad_bytes", self.framework.family)
        cost = self.network.reduce(grad * generic.params, ranks) if layout.dp > 1 else 0.0
        terms["dp_comm"] = max(0.1 * cost, cost - self.dp_hidden * 2 * ahead / layout.micro_batches)
        shards = layout.shards if layout.zero else 1
        terms["optimizer"] = generic.params / shards * 42 / self.kernels.hbm
        terms["overhead"] = self.overhead
        return StepTime({name: value * self.scale for name, value in terms.items()})
