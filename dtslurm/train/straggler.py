"""Which rank holds the others up: what each does on its own account before it waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of all, and how long ranks take alone."""

    rank: int
    seconds: float
    median: float


class OwnTime:
    """Measures the time from the end of a step to the end of the model's forward pass.

    That is fetching data and computing, without the backward pass, in which ranks wait for each other and
    all take as long as the slowest. (Where parameters are sharded, the forward pass waits for others, too.)

    On a GPU it is measured by events, which nobody waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._now()
        self._end: Any = None
        self._sum, self._count = 0.0, 0

    def watch(self, model: torch.nn.Module) -> None:
        """Look at this model's forward passes from now on."""
        model.register_forward_hook(self._forward_ended)

    def step_ended(self) -> None:
        """Note that a step is over."""
        start, end = self._start, self._end
        if end is not None and not self._cuda:
            self._sum += end - start
            self._count += 1
        elif end is not None and end.query():
            self._sum += start.elapsed_time(end) / 1000
            self._count += 1
        self._start, self._end = self._now(), None

    def take(self) -> float:
        """Return the mean since the last call, in seconds; 0 if nothing was seen."""
        mean = self._sum / self._count if self._count else 0.0
        self._sum, self._count = 0.0, 0
        return mean

    def _forward_ended(self, module: Any, inputs: Any, output: Any) -> None:
        del module, inputs, output
        self._end = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Straggler:
    """Compares ranks every so many seconds; the ranks agree on when.

    Args:
        group: a gloo group of all ranks, of its own; None in a single process.
        factor: how many times the median a rank must take to be named.
    """

    def __init__(self, group: Any, factor: float = 1.25) -> None:
        self._group, self._factor = group, factor
        self._pending: tuple[Any, torch.Tensor, list[torch.Tensor]] | None = None

    def begin(self, seconds: float) -> None:
        """Send this rank's own time to the others; they must call it, too. Returns at once."""
        if self._group is None:
            return
        world_size = dist.get_world_size(self._group)
        mine = torch.tensor([seconds], dtype=torch.float64)
        every = list(torch.zeros(world_size, 1, dtype=torch.float64))
        self._pending = (dist.all_gather(every, mine, group=self._group, async_op=True), mine, every)

    def end(self) -> Slowest | None:
        """Return the slowest rank if it is much slower than others; None also if nothing was begun."""
        if self._pending is None:
            return None
        work, _, every = self._pending
        self._pending = None
        work.wait()
        times = [float(one) for one in every]
        middle, worst = median(times), max(times)
        if middle <= 0 or worst < self._factor * middle:
            return None
        return Slowest(times.index(worst), worst, middle)
