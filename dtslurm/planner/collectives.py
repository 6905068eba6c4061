"""Time of collective communication in seconds, from the bandwidth and latency of each level of the fabric.

A group has ``inside`` ranks in each fast domain and spans ``across`` domains. Volumes are those of a ring:
all-gather and reduce-scatter move (n-1)/n of the buffer, all-reduce twice that.
"""

from __future__ import annotations

from typing import NamedTuple

from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import Machine


class Group(NamedTuple):
    """A communication group: its number of ranks in each fast domain, and its number of domains."""

    inside: int
    across: int

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.inside * self.across


def group(machine: Machine, size: int, stride: int) -> Group:
    """Return the group of ``size`` ranks with a distance of ``stride``, in the order tp, cp, ep, dp, pp."""
    domain_ranks = max(1, machine.domain // stride)
    if size <= domain_ranks:
        return Group(size, 1)
    inside = domain_ranks
    while size % inside:
        inside -= 1
    return Group(inside, size // inside)


class Network:
    """The fabric of a machine, with its calibrated bandwidths and latencies."""

    def __init__(self, machine: Machine, framework: tuple[str, ...], constants: Constants) -> None:
        self.machine = machine
        gpu = machine.gpu
        self.inner = machine.link_gbs * 1e9 * constants.of("link_efficiency", gpu.vendor)
        if not gpu.nvlink:  # PCIe: all GPUs of the node share the path through the host
            self.inner *= constants["pcie_efficiency"]
        self.outer = machine.nic_gbs * 1e9 * constants.of("nic_efficiency", machine.fabric)
        self.scattered = constants.of("all_to_all_efficiency", *framework)
        self.inner_latency = constants.of("inner_latency_us", *gpu.variants) * 1e-6
        self.outer_latency = constants.of("outer_latency_us", machine.fabric) * 1e-6
        self.hop = constants.of("hop_latency_us", machine.fabric) * 1e-6

    def gather(self, nbytes: float, ranks: Group, *, rails: float = 1.0) -> float:
        """Return the time of an all-gather to (or reduce-scatter from) ``nbytes`` on every rank.

        ``rails`` is the share of a node's network adapters that the traffic uses, at least one adapter.
        """
        n = ranks.size
        if n <= 1 or nbytes <= 0:
            return 0.0
        volume = nbytes * (n - 1) / n
        inner_speed = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return volume / inner_speed + self._start_up_time(nbytes)
        speed = min(inner_speed, self.outer * max(1.0, ranks.inside * rails))
        return volume / speed + self.outer_latency + self.hop * (n - 1)

    def reduce(self, nbytes: float, ranks: Group) -> float:
        """Return the time of an all-reduce of ``nbytes``; its latency grows more slowly than the ranks.

        The exponent 2/3 fits all-reduces of 256 MB on 2 to 64 nodes over EFA (ultrascale-playbook). It lies
        between the exponents of a ring, which all-gathers show at every size, and of a tree.
        """
        n = ranks.size
        if n <= 1 or nbytes <= 0:
            return 0.0
        volume = 2 * nbytes * (n - 1) / n
        inner_speed = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return volume / inner_speed + self._start_up_time(nbytes)
        speed = min(inner_speed, self.outer * ranks.inside)
        latency: float = 5 * self.hop * n ** (2 / 3)
        return volume / speed + 2 * self.outer_latency + latency

    def _start_up_time(self, nbytes: float) -> float:
        """Return the fixed time of a collective inside a domain: the calls, and filling the ring.

        All-reduces of 1 to 512 MiB on eight A100 take 70 to 210 us longer than their volume would take at the
        speed of 16 GiB; larger ones take longer (stas00/ml-engineering, network).
        """
        return self.inner_latency * (1 + 2 * nbytes / (nbytes + 32 * 1024**2))

    def dispatch(self, token_bytes: float, copies: int, ranks: Group, *, once_per_node: bool) -> float:
        """Return the time in which every rank sends each token to ``copies`` evenly chosen ranks.

        With ``once_per_node`` a token crosses the network once per destination node and is copied there, as
        in DeepEP and HybridEP; otherwise once per copy.
        """
        n = ranks.size
        if n <= 1 or token_bytes <= 0:
            return 0.0
        inner_bytes = token_bytes * copies * (ranks.inside - 1) / n
        latency = self.inner_latency if ranks.across == 1 else self.outer_latency + self.hop * ranks.across
        inner_speed = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return inner_bytes / inner_speed + latency
        remote_domains = ranks.across - 1
        crossings = copies * remote_domains / ranks.across
        if once_per_node:
            crossings = remote_domains * (1 - (1 - 1 / ranks.across) ** copies)
        return (
            max(token_bytes * crossings / (self.outer * self.scattered), inner_bytes / inner_speed) + latency
        )

    def send(self, nbytes: float, *, across: bool) -> float:
        """Return the time of a point-to-point message to a neighbor rank."""
        if across:
            return nbytes / self.outer + self.outer_latency
        return nbytes / (self.inner * self.machine.reach(2)) + self.inner_latency
