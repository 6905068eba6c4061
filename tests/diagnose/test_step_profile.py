"""Where steps spend their time, by the operations in a trace of torch.profiler."""

from __future__ import annotations

import pytest

from dtslurm.cli.printing.profile_rows import explain_straggler, profile_columns, profile_row
from dtslurm.views.step_profile import Operation, summarize_steps


def operation(
    name: str, start: float, end: float, category: str = "cpu_op", thread: str = "1 1"
) -> Operation:
    return Operation(name=name, category=category, thread=thread, start_us=start, end_us=end)


def steps(*ends: float) -> list[Operation]:
    starts = [0.0, *ends]
    return [
        operation(f"ProfilerStep#{number}", starts[number], end, "user_annotation")
        for number, end in enumerate(ends)
    ]


def test_kernels_compute_and_communication_counts_where_none_runs() -> None:
    operations = [
        *steps(500, 1000),
        operation("aten::mm", 0, 1000),  # the CPU is ahead of the GPU, and does not count
        operation("sm90_gemm", 0, 300, "kernel", "0 7"),
        operation("Memcpy HtoD", 300, 400, "gpu_memcpy", "0 7"),
        operation("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 200, 600, "kernel", "0 20"),
        operation(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 550, 750, "user_annotation"
        ),
        operation("sm90_gemm", 900, 1100, "kernel", "0 7"),  # ends after the last step
    ]
    profile = summarize_steps("3", operations)
    assert profile.seconds == pytest.approx(1e-3)
    assert profile.shares == pytest.approx(
        {"compute": 0.5, "communication": 0.2, "data": 0.15, "other": 0.15}
    )
    assert [spot.place for spot in profile.hot_spots] == ["sm90_gemm", "Memcpy HtoD"]
    assert [spot.share for spot in profile.hot_spots] == pytest.approx([0.5, 0.1])
    assert profile_columns([profile]) == ("RANK", "COMPUTE", "COMM", "DATA", "OTHER", "MOST TIME IN")
    assert profile_row(profile) == ("3", "50%", "20%", "15%", "15%", "sm90_gemm 50%")


def test_operators_compute_without_a_gpu_and_count_without_those_in_them() -> None:
    operations = [
        *steps(100),
        operation("aten::linear", 0, 50),
        operation("aten::addmm", 10, 40),
        operation("c10d::allreduce_", 50, 52),  # only starts the collective
        operation("gloo:all_reduce", 40, 90, "user_annotation", "1 2"),
        operation("aten::mul", 0, 10, thread="1 3"),
    ]
    profile = summarize_steps("0", operations)
    assert profile.shares == pytest.approx({"compute": 0.5, "communication": 0.4, "data": 0, "other": 0.1})
    assert [spot.place for spot in profile.hot_spots] == ["aten::addmm", "aten::linear", "aten::mul"]
    assert [spot.share for spot in profile.hot_spots] == pytest.approx([0.3, 0.2, 0.1])


def test_operations_outside_of_the_steps_do_not_count() -> None:
    operations = [
        operation("ProfilerStep#4", 100, 200, "user_annotation"),
        operation("ProfilerStep#4", 0, 900, "gpu_user_annotation"),
        operation("aten::mm", 50, 120),
        operation("aten::mm", 300, 400),
        operation("gloo:broadcast", 0, 100, "user_annotation"),
    ]
    assert summarize_steps("0", operations).shares == pytest.approx(
        {"compute": 0.2, "communication": 0, "data": 0, "other": 0.8}
    )


def test_steps_without_marks_are_from_one_end_of_an_optimizer_to_the_next() -> None:
    operations = [
        operation("PyTorch Profiler (0)", 0, 1000, "Trace"),
        operation("Optimizer.step#AdamW.step", 80, 100, "user_annotation"),
        operation("aten::mm", 90, 150),
        operation("Optimizer.step#AdamW.step", 180, 200, "user_annotation"),
        operation("Optimizer.step#AdamW.step", 880, 900, "gpu_user_annotation"),
        operation("Optimizer.zero_grad#AdamW.zero_grad", 980, 990, "user_annotation"),
    ]
    profile = summarize_steps("0", operations)
    assert [profile.seconds, profile.shares["compute"]] == pytest.approx([1e-4, 0.5])
    whole = summarize_steps("0", operations[:3])
    assert [whole.seconds, whole.shares["compute"]] == pytest.approx([1e-3, 0.06])


def test_empty_trace_has_no_shares() -> None:
    profile = summarize_steps("0", [])
    assert (profile.seconds, set(profile.shares.values()), profile.hot_spots) == (0.0, {0.0}, ())


def test_rank_that_communicates_least_is_the_one_that_the_others_wait_for() -> None:
    slow = summarize_steps("1", [*steps(100), operation("aten::mm", 0, 95)])
    waits = summarize_steps("0", [*steps(100), operation("gloo:all_reduce", 10, 100, "user_annotation")])
    text = explain_straggler([waits, slow])
    assert text.endswith("rank 0 90%: the others wait for rank 1, which is mostly in aten::mm")
