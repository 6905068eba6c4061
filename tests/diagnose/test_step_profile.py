"""Where steps spend their time, by the operations in a trace of torch.profiler."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from dtslurm.cli.printing.profile_rows import explain_straggler, profile_columns, profile_row
from dtslurm.model.runs.profile import RankProfile
from dtslurm.services.observe.inside.profile import interpret_step_traces
from dtslurm.views.step_profile import Operation, find_common_time, summarize_steps


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


def pack(*events: tuple[str, float, float], origin_ns: int | None = None) -> bytes:
    """Return a trace of steps and collectives, each with its begin and its end in microseconds."""
    document: dict[str, Any] = {
        "traceEvents": [
            {
                "ph": "X",
                "name": name,
                "cat": "cpu_op" if name.startswith("aten::") else "user_annotation",
                "pid": 1,
                "tid": 1,
                "ts": start,
                "dur": end - start,
            }
            for name, start, end in events
        ]
    }
    if origin_ns is not None:
        document["baseTimeNanoseconds"] = origin_ns
    return gzip.compress(json.dumps(document).encode())


def explain(**traces: bytes) -> str:
    summaries = [item.summary for item in interpret_step_traces(traces)]
    return explain_straggler([summary for summary in summaries if isinstance(summary, RankProfile)])


def test_rank_that_waited_while_the_profiler_of_another_one_started_is_not_said_to_communicate() -> None:
    """Rank 1 records one step earlier, in which it waits for the profiler of rank 0, and is the slow one."""
    slow = pack(
        ("ProfilerStep#1", 0, 2500),
        ("aten::mm", 0, 300),
        ("gloo:all_reduce", 300, 2490),
        ("ProfilerStep#2", 2500, 2800),
        ("aten::mm", 2500, 2790),
    )
    waits = pack(
        ("ProfilerStep#1", 1502, 1805),
        ("gloo:all_reduce", 1520, 1800),
        ("ProfilerStep#2", 1805, 2105),
        ("gloo:all_reduce", 1815, 2100),
        origin_ns=1_000_000,
    )
    assert "the others wait for rank 1, which is mostly in aten::mm" in explain(**{"0": waits, "1": slow})


def test_ranks_that_recorded_no_time_in_common_are_not_compared() -> None:
    first = pack(("ProfilerStep#1", 0, 100), ("aten::mm", 0, 90))
    second = pack(("ProfilerStep#1", 100, 200), ("gloo:all_reduce", 100, 195))
    text = explain(**{"0": first, "1": second})
    assert text.startswith("which rank the others wait for is unknown")
    assert "the others wait for rank 0" in explain(**{"0": first, "1": pack(("gloo:all_reduce", 150, 250))})


@pytest.mark.parametrize(
    ("steps", "common"),
    [
        ([(0, 300), (100, 400)], (100, 300)),
        ([(0, 300), (220, 520)], (220, 300)),
        ([(0, 300), (230, 530)], None),
        ([(0, 100), (200, 300)], None),
        ([(0, 0)], None),
        ([], None),
    ],
)
def test_time_in_common_is_at_least_a_quarter_of_the_shortest_record(
    steps: list[tuple[float, float]], common: tuple[float, float] | None
) -> None:
    assert find_common_time(steps) == common
