"""Find how much memory steps need and what allocates it, by the allocations that torch.profiler records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dtslurm.model.runs.profile import MemorySpot, RankMemory
from dtslurm.model.values import dataclass
from dtslurm.views.step_profile import Operation, find_steps, nest

_MOST_SPOTS = 3
_ON_CPU = 0  # in c10::DeviceType
_POINT = ""  # the category of an event among operators


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
    operations: Iterable[Operation], events: Sequence[MemoryEvent]
) -> Iterator[tuple[str, MemoryEvent]]:
    """Yield each event after the name of the innermost operator around it."""
    operators = [item for item in operations if item.category == "cpu_op"]
    points = [
        Operation(str(number), _POINT, event.thread, event.time_us, event.time_us)
        for number, event in enumerate(events)
    ]
    for around, item in nest([*operators, *points]):
        if item.category == _POINT:
            yield around[-1].name if around else "no operator", events[int(item.name)]
