"""Find where steps spend their time, by the operations that torch.profiler records."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dtslurm.model.runs.profile import HotSpot, RankProfile
from dtslurm.model.values import dataclass

_STEP = re.compile(r"ProfilerStep#\d+")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#\w+\.step")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
# Kernels of NCCL and RCCL; the threads of gloo and MPI.
_COLLECTIVE_KERNEL = re.compile(r"nccl(?:Dev)?Kernel|rccl", re.IGNORECASE)
_COLLECTIVE_ON_CPU = re.compile(r"(?:gloo|mpi|ucc):\w+")
_DATA = re.compile(r"enumerate\(DataLoader\)")
_MOST_SPOTS = 3
_LEAST_COMMON_SHARE = 0.25  # two of three steps are enough, and a small part of a step is not
Interval = tuple[float, float]


@dataclass(frozen=True)
class Operation:
    """An operation in a trace of torch.profiler.

    Attributes:
        category: its kind, as torch names it, such as ``cpu_op`` or ``kernel``.
        thread: the thread, or the stream of the GPU, that ran it.
        start_us, end_us: microseconds on the clock of the trace.
    """

    name: str
    category: str
    thread: str
    start_us: float
    end_us: float


def summarize_steps(
    label: str, operations: Sequence[Operation], common: Interval | None = None
) -> RankProfile:
    """Return the profile of the steps of a rank, or of a time in which all ranks recorded steps.

    Communication and the loading of data count where nothing computes at the same time, as Holistic Trace
    Analysis does. On a GPU, its kernels compute; without one, the operators of torch do.
    """
    start, end = common or find_steps(operations)
    cut = [item for item in operations if item.end_us > start and item.start_us < end]
    has_gpu = any(item.category in _ON_GPU for item in cut)
    collectives = [item for item in cut if _is_collective(item)]
    work_categories = _ON_GPU if has_gpu else {"cpu_op"}
    work = [
        item
        for item in cut
        if item.category in work_categories
        and not _is_collective(item)
        and not item.name.startswith("c10d::")
    ]
    loading = [item for item in cut if _DATA.match(item.name)]
    total = end - start
    seen: list[Interval] = []
    shares = {}
    for kind, items in (("compute", work), ("communication", collectives), ("data", loading)):
        before = measure(seen)
        seen = merge([*seen, *((max(item.start_us, start), min(item.end_us, end)) for item in items)])
        shares[kind] = (measure(seen) - before) / total if total else 0.0
    shares["other"] = max(0.0, 1.0 - sum(shares.values())) if total else 0.0
    own_us = sum_own_time(work)
    spots = sorted(own_us.items(), key=lambda item: (-item[1], item[0]))[:_MOST_SPOTS]
    return RankProfile(
        label=label,
        seconds=total / 1e6,
        shares=shares,
        hot_spots=tuple(HotSpot(name, us / total) for name, us in spots if total),
    )


def find_steps(operations: Sequence[Operation]) -> Interval:
    """Return the begin of the first step and the end of the last one; (0, 0) without operations.

    In a trace without marked steps, a step lasts from one end of an optimizer's step to the next one, or all
    is one step.
    """
    marked = find_marked_steps(operations)
    if marked is not None:
        return marked
    marks = [item for item in operations if item.category == "user_annotation"]
    ends = [item.end_us for item in marks if _OPTIMIZER_STEP.fullmatch(item.name)]
    if len(ends) > 1:
        return min(ends), max(ends)
    start = min((item.start_us for item in operations), default=0.0)
    return start, max((item.end_us for item in operations), default=0.0)


def find_marked_steps(operations: Sequence[Operation]) -> Interval | None:
    """Return the begin of the first step and the end of the last one that the training loop marked."""
    steps = [item for item in operations if item.category == "user_annotation" and _STEP.fullmatch(item.name)]
    if not steps:
        return None
    return min(item.start_us for item in steps), max(item.end_us for item in steps)


def find_common_time(steps: Sequence[Interval]) -> Interval | None:
    """Return the time in which all ranks recorded steps, None if it is short or there is none.

    A rank that waits while the profiler of another one starts or writes its trace seems to communicate. These
    times are before the first step or after the last step of the other rank.
    """
    start = max((start for start, _ in steps), default=0.0)
    end = min((end for _, end in steps), default=0.0)
    shortest = min((end - start for start, end in steps), default=0.0)
    return (start, end) if end - start > _LEAST_COMMON_SHARE * shortest else None


def _is_collective(operation: Operation) -> bool:
    if operation.category in _ON_GPU:
        return _COLLECTIVE_KERNEL.search(operation.name) is not None
    return _COLLECTIVE_ON_CPU.fullmatch(operation.name) is not None


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not overlap, in their order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def measure(intervals: Iterable[Interval]) -> float:
    """Return the length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def sum_own_time(operations: Iterable[Operation]) -> dict[str, float]:
    """Return the microseconds of each operation by its name, without those of the operations in it."""
    own_us: defaultdict[str, float] = defaultdict(float)
    for around, operation in nest(operations):
        own_us[operation.name] += operation.end_us - operation.start_us
        if around:
            own_us[around[-1].name] -= operation.end_us - operation.start_us
    return own_us


def nest(operations: Iterable[Operation]) -> Iterator[tuple[list[Operation], Operation]]:
    """Yield each operation with those of its thread around it, the outermost first."""
    threads: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        threads[operation.thread].append(operation)
    for items in threads.values():
        around: list[Operation] = []
        for operation in sorted(items, key=lambda item: (item.start_us, -item.end_us)):
            while around and around[-1].end_us <= operation.start_us:
                around.pop()
            yield around, operation
            around.append(operation)
