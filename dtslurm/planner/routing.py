"""Time in seconds of expert-parallel traffic: dispatch of tokens to their experts, and back."""

from __future__ import annotations

from dtslurm.planner.collectives import Network, group
from dtslurm.planner.compute import LayerCost
from dtslurm.planner.constants import Constants
from dtslurm.planner.frameworks import Framework
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import Stack


class Routing:
    """The expert-parallel traffic of one framework on one machine.

    Args:
        even: whether routing is forced to be even, or tokens above an expert's share are dropped, as in
            tables of performance runs. Otherwise, all ranks wait for the rank with the most tokens.
    """

    def __init__(
        self, machine: Machine, network: Network, framework: Framework, constants: Constants, *, even: bool
    ) -> None:
        self.machine = machine
        self.network = network
        self.framework = framework
        self.hidden = constants.of("ep_overlap", framework.family)
        self.slowdown = constants.of("overlap_slowdown", framework.family)
        self.imbalance = 1.0 if even else constants["expert_imbalance"]

    def busiest(self, stack: Stack, layout: Layout, cost: LayerCost) -> LayerCost:
        """Return a layer's cost on the rank that received the most tokens."""
        if not stack.experts or layout.ep == 1:
            return cost
        return cost._replace(
            experts=cost.experts * self.imbalance, experts_backward=cost.experts_backward * self.imbalance
        )

    def exchange(
        self, stack: Stack, layout: Layout, hidden_size: int, seq_len: int, cost: LayerCost
    ) -> tuple[float, float]:
        """Return the exposed time of dispatching tokens to experts and back, forward and backward.

        Across nodes and with virtual stages, the tuned recipes overlap this traffic with a layer of another
        micro-batch (overlap_moe_expert_parallel_comm: Megatron Bridge's DeepSeek-V3 on H100 and B200). GPUs
        that split an expert gather each other's tokens and scatter the results (Megatron-LM's
        --expert-tensor-parallel-size).
        """
        if not stack.experts or layout.ep == 1:
            return 0.0, 0.0
        ranks = group(self.machine, layout.ep, layout.etp)
        tokens = layout.mbs * seq_len / layout.cp / layout.tp
        nbytes = 2.0 * tokens * hidden_size
        top_k = stack.experts.top_k
        is_tuned = self.framework.once_per_node
        time = self.network.dispatch(nbytes, top_k, ranks, once_per_node=is_tuned) * self.imbalance
        if self.framework.name == "megatron":  # default: each rank gathers all tokens and keeps its own
            time = min(time, self.network.gather(nbytes * ranks.size, ranks))
        round_trip = 2 * time * (1 - self.hidden)
        if layout.etp > 1:
            tensor_group = group(self.machine, layout.etp, 1)
            round_trip += 2 * self.network.gather(nbytes * top_k * layout.etp * self.imbalance, tensor_group)
        if not is_tuned or ranks.across == 1 or layout.vp == 1:
            return round_trip, round_trip
        hidden_forward, hidden_backward = min(round_trip, cost.forward), min(round_trip, cost.backward)
        return round_trip - (1 - self.slowdown) * hidden_forward, round_trip - (
            1 - self.slowdown
        ) * hidden_backward
