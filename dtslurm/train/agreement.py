"""What all ranks must do at the same step: leave, save, compare. Asked for rarely, and without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

STOP, SAVE, STALE, COMPARE = 1, 2, 4, 8
LONGEST = 1024  # steps between two questions


@dataclass(frozen=True)
class AgreedAction:
    """What some rank asked for and all do now."""

    stop: bool = False
    save: bool = False
    stale: bool = False
    compare: bool = False


class Agreement:
    """An all-reduce of five numbers on the CPU, begun at one step and read at the next.

    Every rank begins and reads at the same steps: how many steps lie between two questions is itself agreed,
    the least that any rank proposes. So it matters not at which step a signal reaches which rank.

    Args:
        group: a gloo group of all ranks, of its own; None in a single process.
        every: steps between two questions; None to ask about twice a second.
    """

    def __init__(self, group: Any, every: int | None = None) -> None:
        self._group, self._every = group, every
        self._next = 1
        self._pending: tuple[Any, torch.Tensor] | None = None

    def due(self, step: int) -> bool:
        """Whether `at` does more at this step than count: what it is told is then looked at."""
        return self._pending is not None or step >= self._next

    def at(self, step: int, wishes: int, step_time: float) -> AgreedAction:
        """Take part at a step's end, and return what was agreed.

        Args:
            step: counted from 1 since this process began; the same on all ranks.
            wishes: of ``STOP | SAVE | STALE | COMPARE``, what this rank wants.
            step_time: seconds a step takes here, as far as known; 0 if not.
        """
        verdict = AgreedAction()
        if self._pending is not None:
            verdict = self._read(step, *self._pending)
        elif step >= self._next:
            interval = self._every or (min(LONGEST, max(1, int(0.5 / step_time))) if step_time > 0 else 1)
            asked = [*(wishes & one for one in (STOP, SAVE, STALE, COMPARE)), -interval]
            numbers = torch.tensor(asked, dtype=torch.int64)
            work = None
            if self._group is not None:
                work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending = (work, numbers)
            if work is None:
                verdict = self._read(step, work, numbers)
        return verdict

    def close(self) -> None:
        """Wait for what was begun, so that no rank is left alone with it."""
        if self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        self._pending = None

    def _read(self, step: int, work: Any, numbers: torch.Tensor) -> AgreedAction:
        self._pending = None
        if work is not None:
            work.wait()
        *wishes, interval = numbers.tolist()
        self._next = step - interval
        return AgreedAction(*map(bool, wishes))
