"""Time of collective communication: bandwidth and latency of each level of the fabric, seconds.

A group has ``inside`` ranks in each fast domain and spans ``across`` domains. Volumes are those of a ring:
all-gather and reduce-scatter move (n-1)/n of the whole, all-reduce twice that.
"""

from __future__ import annotations

from typing import NamedTuple

from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import Machine


class Group(NamedTuple):
    """Ranks that talk: how many share a fast domain, and how many domains they span."""

    inside: int
    across: int

    @property
    def size(self) -> int:
        """All ranks."""
        return self.inside * self.across


def group(machine: Machine, size: int, stride: int) -> Group:
    """Return the group of ``size`` ranks that stand ``stride`` apart, in the order tp, cp, ep, dp, pp."""
    room = max(1, machine.domain // stride)
    if size <= room:
        return Group(size, 1)
    inside = room
    while size % inside:
        inside -= 1
    return Group(inside, size // inside)


class Network:
    """The fabric of a machine with the constants that describe it."""

    def __init__(self, machine: Machine, framework: tuple[str, ...], constants: Constants) -> None:
        self.machine = machine
        gpu = machine.gpu
        self.inner = machine.link_gbs * 1e9 * constants.of("link_efficiency", gpu.vendor)
        if not gpu.nvlink:  # PCIe: every GPU of the node shares the way through the host
            self.inner *= constants["pcie_efficiency"]
        nic = machine.nic_gbs * 1e9 * constants.of("nic_efficiency", machine.fabric)
        self.outer = nic / max(1.0, machine.oversubscription)
        self.scattered = constants.of("all_to_all_efficiency", *framework)
        self.inner_latency = constants.of("inner_latency_us", *gpu.variants) * 1e-6
        self.outer_latency = constants.of("outer_latency_us", machine.fabric) * 1e-6
        self.hop = constants.of("hop_latency_us", machine.fabric) * 1e-6

    def gather(self, nbytes: float, ranks: Group, *, rails: float = 1.0) -> float:
        """Return the time to all-gather to (or reduce-scatter from) ``nbytes`` on every rank.

        ``rails`` is the share of a node's adapters that the traffic reaches, one adapter at least.
        """
        n = ranks.size
        if n <= 1 or nbytes <= 0:
            return 0.0
        volume = nbytes * (n - 1) / n
        inner = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return volume / inner + self._start(nbytes)
        speed = min(inner, self.outer * max(1.0, ranks.inside * rails))
        return volume / speed + self.outer_latency + self.hop * (n - 1)

    def reduce(self, nbytes: float, ranks: Group) -> float:
        """Return the time to all-reduce ``nbytes``; latency grows slower than the ranks.

        The power of 2/3 is that of 256 MB all-reduces on 2 to 64 nodes over EFA (ultrascale-playbook):
        between a ring, which gathers show at every size, and a tree.
        """
        n = ranks.size
        if n <= 1 or nbytes <= 0:
            return 0.0
        volume = 2 * nbytes * (n - 1) / n
        inner = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return volume / inner + self._start(nbytes)
        speed = min(inner, self.outer * ranks.inside)
        latency: float = 5 * self.hop * n ** (2 / 3)
        return volume / speed + 2 * self.outer_latency + latency

    def _start(self, nbytes: float) -> float:
        """Return what a collective inside a domain takes beside its volume: the calls, and filling the ring.

        All-reduces of 1 to 512 MiB on eight A100 take 70 to 210 us more than their volume at the speed of
        16 GiB, the larger ones more (stas00/ml-engineering, network).
        """
        return self.inner_latency * (1 + 2 * nbytes / (nbytes + 32 * 1024**2))

    def dispatch(self, token_bytes: float, copies: int, ranks: Group, *, once_per_node: bool) -> float:
        """Return the time in which every rank sends each token to ``copies`` ranks chosen evenly.

        With ``once_per_node`` a token crosses the network once for every node it is wanted on and is copied
        there, as DeepEP and HybridEP do; else once per copy.
        """
        n = ranks.size
        if n <= 1 or token_bytes <= 0:
            return 0.0
        inside = token_bytes * copies * (ranks.inside - 1) / n
        latency = self.inner_latency if ranks.across == 1 else self.outer_latency + self.hop * ranks.across
        inner = self.inner * self.machine.reach(ranks.inside)
        if ranks.across == 1:
            return inside / inner + latency
        remote = ranks.across - 1
        crossings = copies * remote / ranks.across
        if once_per_node:
            crossings = remote * (1 - (1 - 1 / ranks.across) ** copies)
        return max(token_bytes * crossings / (self.outer * self.scattered), inside / inner) + latency

    def send(self, nbytes: float, *, across: bool) -> float:
        """Return the time of a message to one neighbour."""
        if across:
            return nbytes / self.outer + self.outer_latency
        return nbytes / (self.inner * self.machine.reach(2)) + self.inner_latency
