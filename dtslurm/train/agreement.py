"""Agreement of all ranks on actions for the same step (stop, save, compare), rare and asynchronous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# The actions, as flags: end training, write a checkpoint, exit because a later attempt has begun, and compare
# the speeds of the ranks.
STOP, SAVE, STALE, COMPARE = 1, 2, 4, 8
LONGEST = 1024  # maximum number of steps between two agreements


@dataclass(frozen=True)
class AgreedAction:
    """The actions that at least one rank requested, and that all ranks now perform.

    Attributes:
        stale: whether a later attempt of the run has begun, so that this attempt must exit.
        compare: whether to compare the speeds of the ranks.
    """

    stop: bool = False
    save: bool = False
    stale: bool = False
    compare: bool = False


class Agreement:
    """An all-reduce of five numbers on the CPU, started at one step and read at the next.

    Every rank starts and reads the all-reduce at the same steps, because the ranks also agree on the number
    of steps until the next agreement: the smallest number that any rank proposes. A signal may therefore
    reach the ranks at different steps.

    Args:
        group: a gloo group of all ranks that nothing else uses; None in a single process.
        every: steps between two agreements; None for about two agreements per second.
    """

    def __init__(self, group: Any, every: int | None = None) -> None:
        self._group, self._every = group, every
        self._next = 1
        self._pending: tuple[Any, torch.Tensor] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether `at` starts or reads an all-reduce at this step, and so uses its arguments."""
        return self._pending is not None or step >= self._next

    def at(self, step: int, requested_actions: int, step_time: float) -> AgreedAction:
        """Start or read the all-reduce at the end of a step, and return the agreed actions.

        Args:
            step: steps since this process started, counted from 1; the same on all ranks.
            requested_actions: the actions this rank requests, a sum of ``STOP | SAVE | STALE | COMPARE``.
            step_time: seconds per step on this rank; 0 if unknown.
        """
        action = AgreedAction()
        if self._pending is not None:
            action = self._read(step, *self._pending)
        elif step >= self._next:
            interval = self._every or (min(LONGEST, max(1, int(0.5 / step_time))) if step_time > 0 else 1)
            proposal = [*(requested_actions & flag for flag in (STOP, SAVE, STALE, COMPARE)), -interval]
            # The maximum of the negated intervals is the smallest interval.
            numbers = torch.tensor(proposal, dtype=torch.int64)
            work = None
            if self._group is not None:
                work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending = (work, numbers)
            if work is None:
                action = self._read(step, work, numbers)
        return action

    def close(self) -> None:
        """Wait for the pending all-reduce, so that no other rank waits for this one."""
        if self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        self._pending = None

    def _read(self, step: int, work: Any, numbers: torch.Tensor) -> AgreedAction:
        self._pending = None
        if work is not None:
            work.wait()
        *agreed_flags, negated_interval = numbers.tolist()
        self._next = step - negated_interval
        return AgreedAction(*map(bool, agreed_flags))
