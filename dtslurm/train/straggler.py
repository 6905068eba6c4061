"""Detection of the slowest rank, by the time that each rank works before it waits for the others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Slowest:
    """The slowest rank, its own seconds per step, and the median of all ranks."""

    rank: int
    seconds: float
    median: float


class ForwardTimer:
    """Measures the time from the end of a step to the end of the model's forward pass.

    This time covers data loading and the forward computation. It excludes the backward pass, in which ranks
    wait for each other and all take as long as the slowest rank. (With sharded parameters, ranks also wait
    for each other in the forward pass.)

    On a GPU, CUDA events measure the time without synchronization.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._record_time()
        self._end: Any = None
        self._sum, self._count = 0.0, 0

    def watch(self, model: torch.nn.Module) -> None:
        """Time this model's forward passes from now on."""
        model.register_forward_hook(self._forward_ended)

    def step_ended(self) -> None:
        """Record the end of a step."""
        start, end = self._start, self._end
        if end is not None and not self._cuda:
            self._sum += end - start
            self._count += 1
        elif end is not None and end.query():  # a step that the GPU has not finished is not counted
            self._sum += start.elapsed_time(end) / 1000
            self._count += 1
        self._start, self._end = self._record_time(), None

    def take(self) -> float:
        """Return the mean in seconds since the last call; 0 without a measured step."""
        mean = self._sum / self._count if self._count else 0.0
        self._sum, self._count = 0.0, 0
        return mean

    def _forward_ended(self, module: Any, inputs: Any, output: Any) -> None:
        del module, inputs, output
        self._end = self._record_time()

    def _record_time(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Straggler:
    """Compares the ranks' own times (see `ForwardTimer`); the ranks agree on the steps at which to compare.

    Args:
        group: a gloo group of all ranks that nothing else uses; None in a single process.
        factor: multiple of the median from which a rank counts as slow.
    """

    def __init__(self, group: Any, factor: float = 1.25) -> None:
        self._group, self._factor = group, factor
        self._pending: tuple[Any, torch.Tensor, list[torch.Tensor]] | None = None

    def begin(self, seconds: float) -> None:
        """Start to all-gather the ranks' own times in seconds, and return at once; all ranks must call it."""
        if self._group is None:
            return
        world_size = dist.get_world_size(self._group)
        own_time = torch.tensor([seconds], dtype=torch.float64)
        all_times = list(torch.zeros(world_size, 1, dtype=torch.float64))
        self._pending = (
            dist.all_gather(all_times, own_time, group=self._group, async_op=True),
            own_time,
            all_times,
        )

    def end(self) -> Slowest | None:
        """Return the slowest rank if it is much slower than the median; None if not, or without a `begin`."""
        if self._pending is None:
            return None
        work, _, all_times = self._pending
        self._pending = None
        work.wait()
        times = [float(seconds) for seconds in all_times]
        median_time, longest_time = median(times), max(times)
        if median_time <= 0 or longest_time < self._factor * median_time:
            return None
        return Slowest(times.index(longest_time), longest_time, median_time)
