"""The curves of a report, and the displayed state."""

from __future__ import annotations

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.services.observe import report
from dtslurm.services.runs.status import RunView


def test_a_curve_needs_two_points_that_are_numbers() -> None:
    points = (
        TrainPoint(step=3, loss=1.0, grad_norm=5.0),
        TrainPoint(step=1, loss=2.0),
        TrainPoint(step=2, loss=float("nan")),
        TrainPoint(tokens_per_s=7.0),
        TrainPoint(tokens_per_s=8.0),
    )
    curves = report._curves({0: points})
    result = {curve["label"]: (curve["steps"], curve["lines"][0]["values"]) for curve in curves}
    assert result == {"loss": ((1, 3), (2.0, 1.0)), "tokens/s": ((3, 4), (7.0, 8.0))}


def test_curves_join_the_attempts_and_mark_restarts() -> None:
    attempts = {0: [TrainPoint(step=step, loss=4.0 - step) for step in range(3)],
                1: [TrainPoint(step=step, loss=9.0 - step) for step in (1, 2, 3)]}  # fmt: skip
    [loss] = report._curves(attempts)
    assert (loss["steps"], loss["lines"][0]["values"]) == ((0, 1, 2, 3), (4.0, 8.0, 7.0, 6.0))
    assert loss["restarts"] == [{"attempt": 1, "step": 1}]


def test_the_state_in_a_report_is_that_of_the_selected_task() -> None:
    record = JobRecord(
        token="t",
        cluster="hpc",
        name="x",
        run_dir="/r",
        phase="submitted",
        created_at=0.0,
        job_id="17",
        array="1-2",
    )
    tasks = tuple(
        JobStatus(job_id=f"17_{task}", state=state)
        for task, state in (("1", JobState.FAILED), ("2", JobState.COMPLETED))
    )
    view = RunView(record, tasks)
    assert [report._state(view, task) for task in ("1", "2", None, "9")] == [
        "FAILED", "COMPLETED", "COMPLETED, FAILED", "COMPLETED, FAILED",
    ]  # fmt: skip
