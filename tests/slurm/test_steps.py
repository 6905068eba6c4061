"""Steps of jobs, as squeue and sacct list them."""

from __future__ import annotations

import pytest

from dtslurm.model.runs.state import JobState
from dtslurm.slurm import commands, steps
from dtslurm.slurm.arrays import is_step_id, matches_job_id
from dtslurm.slurm.fields import FIELD_END, RECORD_END


def row(*values: str) -> str:
    return FIELD_END.join(values)


def test_running_steps_are_parsed_with_the_name_that_identifies_their_run() -> None:
    rows = [
        row("17.0", "0", "1764271035", "n1", "main", "dtslurm:tok:hash"),
        row("17.1", "0", "1764271036", "n[1-2]", "main", "a\nb" + FIELD_END + "c"),
        row("17.2", "1000", "1764271036", "n1", "main", "bash"),
        row("17.batch", "0", "1764271035", "n1", "main", "batch"),
        "cut off",
    ]
    listed = steps.running("\n".join(text + RECORD_END for text in rows), uid=0, observed_at=5.0)
    assert [(step.job_id, step.raw_id, step.state) for step in listed] == [
        ("17.0", "17", JobState.RUNNING),
        ("17.1", "17", JobState.RUNNING),
    ]
    assert (listed[0].comment, listed[0].start_time, listed[0].nodelist) == (
        "dtslurm:tok:hash",
        1764271035,
        "n1",
    )


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", (JobState.COMPLETED, 0, None)),
        ("FAILED", "3:0", (JobState.FAILED, 3, None)),
        ("CANCELLED by 0", "0:9", (JobState.CANCELLED, None, 9)),
        ("RUNNING", "0:0", (JobState.RUNNING, None, None)),
    ],
)
def test_ended_steps_have_their_state_and_exit_code(
    state: str, code: str, expected: tuple[JobState, int | None, int | None]
) -> None:
    text = row("17.0", state, code, "1764271035", "1764271040", "n1", "dtslurm:tok:hash") + "\n"
    batch = row("17.batch", state, code, "1764271035", "1764271040", "n1", "batch") + "\n"
    [step] = steps.accounted(text + batch, observed_at=5.0)
    assert (step.state, step.exit_code, step.signal) == expected
    assert (step.job_id, step.comment) == ("17.0", "dtslurm:tok:hash")


def test_a_step_matches_only_itself() -> None:
    assert is_step_id("17.0")
    assert not is_step_id("17")
    assert not is_step_id("17.batch")
    assert matches_job_id("17.0", "17.0")
    assert not matches_job_id("17.0", "17")
    assert not matches_job_id("17", "17.0")
    assert not matches_job_id("17_3", "17.3")


def test_query_of_steps_costs_one_request() -> None:
    assert commands.cost(commands.squeue_steps()) == 1
