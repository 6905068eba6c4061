"""Metrics over the attempts of a run."""

from __future__ import annotations

from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.services.observe.curves import join_attempts, restart_steps


def attempt(*values: tuple[int | None, float]) -> list[TrainPoint]:
    return [TrainPoint(step=step, loss=loss) for step, loss in values]


def test_retrained_steps_have_the_value_of_the_last_attempt() -> None:
    attempts = [attempt((0, 4.0), (1, 3.0), (2, 2.5)), attempt((1, 2.0), (2, 1.0))]
    assert join_attempts(attempts, "loss") == ((0, 4.0), (1, 2.0), (2, 1.0))
    assert restart_steps(dict(enumerate(attempts))) == {1: 1}


def test_join_attempts_omits_nan_losses() -> None:
    assert join_attempts([attempt((0, 1.0), (1, float("nan")))], "loss") == ((0, 1.0),)


def test_points_without_steps_are_numbered_over_all_attempts() -> None:
    attempts = [attempt((None, 3.0), (None, 2.0)), [], attempt((None, 1.0))]
    assert join_attempts(attempts, "loss") == ((0, 3.0), (1, 2.0), (2, 1.0))
    assert restart_steps(dict(enumerate(attempts))) == {}
