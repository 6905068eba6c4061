"""Find how much memory steps need and what allocates it, by the allocations that torch.profiler records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dtslurm.model.runs.profile import MemorySpot, RankMemory
from dtslurm.model.values import dataclass
from dtslurm.views.step_profile import Operation, find_steps

_MOST_SPOTS = 3
_ON_CPU = 0  # in c10::DeviceType


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation, or with negative ``size`` a release, of torch's allocator.

    Attributes:
        time_us: microseconds on the clock of the trace.
        thread: as in `Operation`.
        device_type, device: the kind of device as torch numbers it, and its number.
        size: in bytes.
        allocated, reserved: bytes that the allocator has given out, and has got from the device, afterwards;
            of the CPU, those given out since the profiler started, and 0.
    """

    time_us: float
    thread: str
    device_type: int
    device: int
    size: int
    allocated: int
    reserved: int


def summarize_memory(
    label: str, operations: Sequence[Operation], allocations: Iterable[MemoryEvent]
) -> RankMemory:
    """Return the memory of the steps of a rank: of its GPU if it used one, else of the CPU."""
    start, end = find_steps(operations)
    ordered = sorted(allocations, key=lambda item: item.time_us)
    inside = [item for item in ordered if start <= item.time_us <= end]
    device = max(((item.device_type, item.device) for item in inside), default=(_ON_CPU, -1))
    chosen = [item for item in inside if (item.device_type, item.device) == device]
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, item in _name_operations(operations, chosen):
        sizes[name] += max(0, item.size)
    largest_first = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return RankMemory(
        label=label,
        device="CPU" if device[0] == _ON_CPU else f"GPU {max(0, device[1])}",
        peak=max((item.allocated for item in chosen), default=0),
        reserved=max((item.reserved for item in chosen), default=0),
        growth=chosen[-1].allocated - (chosen[0].allocated - chosen[0].size) if chosen else 0,
        spots=tuple(MemorySpot(name, size) for name, size in largest_first[:_MOST_SPOTS] if size),
    )


def _name_operations(
    operations: Iterable[Operation], allocations: Iterable[MemoryEvent]
) -> Iterator[tuple[str, MemoryEvent]]:
    """Yield each allocation after the name of the innermost operator around it."""
    threads: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.category == "cpu_op":
            threads[operation.thread].append(operation)
    for items in threads.values():
        items.sort(key=lambda item: (item.start_us, -item.end_us))
    begun: defaultdict[str, int] = defaultdict(int)
    around: defaultdict[str, list[Operation]] = defaultdict(list)
    for allocation in allocations:
        thread = allocation.thread
        items, stack = threads[thread], around[thread]
        while begun[thread] < len(items) and items[begun[thread]].start_us <= allocation.time_us:
            stack.append(items[begun[thread]])
            begun[thread] += 1
        while stack and stack[-1].end_us < allocation.time_us:
            stack.pop()
        yield stack[-1].name if stack else "no operator", allocation
