"""Partial results of scontrol requeue, from the messages of Slurm 22.05."""

from __future__ import annotations

import pytest

from dtslurm.errors import SlurmError
from dtslurm.scheduler.base import PartialResult
from dtslurm.scheduler.partial_results import parse_partial_result
from dtslurm.transport.base import Completed

WAITS = "Job is pending execution"


def answer(*lines: str) -> Completed:
    return Completed(("scontrol", "requeue"), 1, "", "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("job_ids", "lines", "partial_result"),
    [
        (["23"], ["23_0-1: No error", f"23_2-3: {WAITS}"], PartialResult(("23",), ("23_2-3",))),
        (["23", "7"], ["23_0-1: No error", f"{WAITS} for job 7"], PartialResult(("23",), ("7",))),
        (["23", "7"], [f"{WAITS} for job 7"], PartialResult(("23",), ("7",))),
        (["23_1", "23_3"], [f"23_2-3: {WAITS}"], PartialResult(("23_1",), ("23_2-3",))),
        (
            ["23_1", "8"],
            ["23_1: No error", "8: Invalid job id"],
            PartialResult(("23_1",), (), ("8: Invalid job id",)),
        ),
    ],
)
def test_requeue_answer_separates_requeued_and_waiting_tasks(
    job_ids: list[str], lines: list[str], partial_result: PartialResult
) -> None:
    assert parse_partial_result(job_ids, answer(*lines)) == partial_result


@pytest.mark.parametrize(
    ("job_ids", "lines"),
    [
        (["7", "23_3"], [f"{WAITS} for job 7", f"23_2-3: {WAITS}"]),
        (["23_[2-3]"], [f"23_2-3: {WAITS}"]),
        (["23"], [f"23_0,2-3: {WAITS}"]),
        (["7", "8"], ["slurm_requeue error: Access denied"]),
        (["7"], []),
    ],
)
def test_requeue_answer_without_a_requeued_job_is_an_error(job_ids: list[str], lines: list[str]) -> None:
    with pytest.raises(SlurmError, match="scontrol requeue"):
        parse_partial_result(job_ids, answer(*lines))
