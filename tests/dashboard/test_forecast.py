from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtslurm.dashboard import words
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.views.forecast import Forecast, forecast

STEADY = [(1000.0 + 2 * step, float(100 + step)) for step in range(60)]  # half a step a second


def forecast_of(**values: object) -> Forecast:
    result = forecast(STEADY, now=1120.0, **values)  # type: ignore[arg-type]
    assert result is not None
    return result


def test_the_forecast_extrapolates_the_current_pace() -> None:
    result = forecast_of(total=1000)
    assert result.step == 159
    assert result.pace == pytest.approx(0.5)
    assert result.done_at == pytest.approx(1118 + (1000 - 159) * 2)
    assert result.cut_at is None
    assert result.share == pytest.approx(0.159)


def test_a_time_limit_before_the_end_gives_the_last_step() -> None:
    result = forecast_of(total=1000, limit_at=1118 + 200.0)
    assert result.cut_at == 259
    assert words.describe_cut(result) == "will stop at step 259 of 1,000"


def test_a_time_limit_after_the_end_cuts_nothing() -> None:
    assert forecast_of(total=1000, limit_at=1e6).cut_at is None


def test_without_a_total_the_forecast_has_only_a_pace() -> None:
    result = forecast_of(limit_at=1200.0)
    assert (result.total, result.done_at, result.cut_at, result.share) == (None, None, None, None)
    assert result.pace == pytest.approx(0.5)


def test_only_steps_after_a_restart_count() -> None:
    points = [*STEADY, (1200.0, 120.0), (1201.0, 121.0), (1202.0, 122.0)]
    result = forecast(points, total=130, now=1202.0)
    assert result is not None
    assert result.step == 122
    assert result.pace == pytest.approx(1.0)


def test_a_clock_that_is_set_back_gives_no_negative_pace() -> None:
    points = [(1000.0, 1.0), (1010.0, 2.0), (500.0, 3.0), (510.0, 4.0), (520.0, 5.0)]
    result = forecast(points, total=10, now=520.0)
    assert result is not None
    assert result.pace == pytest.approx(0.1)


def test_a_run_without_new_steps_is_stalled() -> None:
    result = forecast(STEADY, total=1000, now=1118.0 + 300)
    assert result is not None
    assert result.stalled
    assert result.done_at == pytest.approx(1418 + (1000 - 159) * 2)
    assert "no step for 5m00s" in "\n".join(words.describe_forecast(result, 1418.0))


@pytest.mark.parametrize(("pace", "every"), [(50, 10), (1, 5), (400, 5)])
def test_the_pace_of_batched_lines_is_measured_between_batches(pace: int, every: int) -> None:
    batches = [
        [(1000.0 + number * every, float(number * pace * every + line)) for line in range(pace * every)]
        for number in range(4)
    ]
    points = [point for batch in batches for point in batch]
    result = forecast(points, now=points[-1][0])
    assert result is not None
    assert result.pace == pytest.approx(pace)
    early = forecast(batches[0] + batches[1], now=1010.0)
    assert early is not None
    assert early.pace is None
    drawn = tuple(TrainPoint(step=int(step), time=time) for time, step in points)
    assert [value for _, value in words.measure_steps_per_second(drawn)] == pytest.approx([pace] * 3)
    assert words.measure_steps_per_second(drawn[: 2 * pace * every]) == []


def test_points_that_are_not_finite_are_ignored() -> None:
    points = [(math.nan, 1.0), (1.0, math.inf), (1.0, 1e308), (2.0, -4.0)]
    assert forecast(points, now=5.0) is None
    result = forecast([*points, (3.0, 7.0)], total=math.inf, now=5.0)
    assert result is not None
    assert (result.step, result.total) == (7, None)


def test_a_finished_run_has_no_expected_end() -> None:
    result = forecast([(1.0, 9.0), (2.0, 10.0)], total=10, now=3.0, limit_at=3.5)
    assert result is not None
    assert (result.share, result.done_at, result.cut_at) == (1.0, None, None)


numbers = st.floats() | st.integers(-5, 10**6).map(float)


@given(st.lists(st.tuples(numbers, numbers), max_size=30), numbers, numbers, numbers)
@example([(-3.2e303, 0.0), (0.0, 1.0)], 56951.0, 0.0, 0.0)
@example([(0.0, 0.0), (1.0, 5e-324)], 100.0, 0.0, 0.0)
@example([(0.0, 0.0), (9e11, 5e-324)], 100.0, 0.0, 0.0)
def test_arbitrary_points_give_a_printable_forecast(
    points: list[tuple[float, float]], total: float, now: float, limit: float
) -> None:
    if not math.isfinite(now):
        return
    result = forecast(points, total=total, now=now, limit_at=limit if math.isfinite(limit) else None)
    if result is not None:
        assert all(words.describe_forecast(result, now))
        assert result.cut_at is None or result.cut_at >= 0
