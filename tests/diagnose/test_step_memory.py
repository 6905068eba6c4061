"""How much memory steps need, by the allocations in a trace of torch.profiler."""

from __future__ import annotations

from dtslurm.cli.printing.profile_rows import MEMORY_COLUMNS, memory_row
from dtslurm.model.runs.profile import MemorySpot
from dtslurm.views.step_memory import MemoryEvent, summarize_memory
from tests.diagnose.test_step_profile import operation, steps

MIB = 1 << 20


def allocation(
    time: float, size: int, allocated: int, *, gpu: int | None = None, reserved: int = 0, thread: str = "1 1"
) -> MemoryEvent:
    """An allocation of so many MiB, after which so many are allocated."""
    return MemoryEvent(
        time_us=time,
        thread=thread,
        device_type=0 if gpu is None else 1,
        device=-1 if gpu is None else gpu,
        size=size * MIB,
        allocated=allocated * MIB,
        reserved=reserved * MIB,
    )


def test_memory_of_the_gpu_is_shown_if_the_rank_uses_one() -> None:
    operations = [*steps(100, 200), operation("aten::linear", 10, 60), operation("aten::empty", 20, 30)]
    allocations = [
        allocation(25, 100, 1100, gpu=3, reserved=1500),
        allocation(50, 30, 1130, gpu=3, reserved=1500),
        allocation(55, 7, 7),  # of the CPU
        allocation(70, 1, 1131, gpu=3, reserved=1500),
        allocation(80, 9000, 9000, gpu=3, thread="1 2", reserved=9500),  # another thread
        allocation(90, -9000, 0, gpu=3, thread="1 2", reserved=9500),
        allocation(190, -60, 1040, gpu=3, reserved=1500),
        allocation(250, 5000, 6000, gpu=3, reserved=99999),  # after the steps
    ]
    memory = summarize_memory("5", operations, reversed(allocations))
    assert (memory.device, memory.peak, memory.reserved) == ("GPU 3", 9000 * MIB, 9500 * MIB)
    assert memory.growth == 40 * MIB  # 1,000 before, 1,040 after
    assert memory.spots == (
        MemorySpot("no operator", 9001 * MIB),
        MemorySpot("aten::empty", 100 * MIB),
        MemorySpot("aten::linear", 30 * MIB),
    )


def test_memory_of_the_cpu_is_shown_without_a_gpu() -> None:
    operations = [*steps(100), operation("aten::mm", 10, 20), operation("aten::mm", 40, 50)]
    allocations = [allocation(15, 2, 2), allocation(45, 2, 4), allocation(60, -3, 1)]
    memory = summarize_memory("0", operations, allocations)
    assert memory_row(memory) == ("0", "CPU", "4.0 MiB", "-", "+1.0 MiB", "aten::mm 4.0 MiB")
    assert len(MEMORY_COLUMNS) == len(memory_row(memory))


def test_steps_that_release_memory_shrink_it() -> None:
    memory = summarize_memory("0", steps(100), [allocation(50, -8, 2, gpu=0, reserved=10)])
    assert memory_row(memory)[:5] == ("0", "GPU 0", "2.0 MiB", "10.0 MiB", "-8.0 MiB")


def test_steps_without_allocations_have_no_memory() -> None:
    memory = summarize_memory("0", steps(100), [])
    assert (memory.device, memory.peak, memory.growth, memory.spots) == ("CPU", 0, 0, ())
