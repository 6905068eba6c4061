from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dtslurm.dashboard import words
from dtslurm.dashboard.charts.curves import draw_plot
from dtslurm.dashboard.charts.plot import draw_bar, draw_curve
from dtslurm.model.runs.activity import Activity, NodeActivity
from dtslurm.model.runs.telemetry import NodeSample, RankTelemetry, RunTelemetry, TrainPoint
from dtslurm.services.observe.run_list import add_page
from dtslurm.views.run_page import MOST_POINTS, JobOutlook, Page, page
from tests.dashboard.samples import NOW, page_of, row, telemetry_of


def test_stragglers_and_idle_gpus_are_outliers() -> None:
    result = {cell.rank: cell.deviation for cell in page_of(16).outliers}
    assert result == {
        5: "no output while other ranks write",
        9: "exit code 1",
        12: "its GPU use is lower than that of other ranks",
    }
    assert page_of(16, odd=False).outliers == ()


def test_a_run_that_is_silent_on_all_ranks_has_no_outlier() -> None:
    ranks = {
        rank: RankTelemetry(rank=rank, last_output_at=NOW - 600 - rank, started=1, node_rank=0)
        for rank in range(8)
    }
    made = page(
        RunTelemetry(now=NOW, attempt=0, attempts=(0,), world_size=8, ranks=ranks), key="k", taken_at=NOW
    )
    assert made.outliers == ()


def stalled_telemetry() -> RunTelemetry:
    node = NodeActivity(
        time=NOW - 2, ranks=(0, 1, 2, 3), seen=(0, 1, 2, 3), learned=True, output=NOW - 220, cpu=NOW - 221
    )
    return replace(telemetry_of(4), activity=(node,))


def test_the_page_of_a_stalled_run_has_no_expected_end() -> None:
    made = page(stalled_telemetry(), key="k", taken_at=NOW)
    assert made.activity is not None
    assert (made.activity.stalled, made.activity.quiet_s) == (True, 220)
    assert made.forecast is not None
    assert made.forecast.stalled
    assert not any("done in" in line for line in words.describe_forecast(made.forecast, NOW))
    over = page(stalled_telemetry(), key="k", taken_at=NOW, job=JobOutlook(has_ended=True))
    assert over.activity is None
    result = add_page(row(1), made)
    assert result.stalled
    assert result.forecast == made.forecast
    assert not add_page(row(1, over=True), made).stalled
    assert add_page(result, page_of(4)).stalled  # a page without samples says nothing against it
    later = Activity(stalled=False, since=NOW + 30, quiet_s=2)
    assert add_page(replace(result, activity=later), made).activity == later


def test_ranks_without_a_record_wait_and_ranks_without_an_end_are_lost() -> None:
    run_telemetry = RunTelemetry(
        now=NOW, attempt=0, attempts=(0,), world_size=3, ranks={1: RankTelemetry(rank=1, started=1)}
    )
    assert [cell.state for cell in page(run_telemetry, key="k", taken_at=NOW).ranks] == [
        "waiting",
        "running",
        "waiting",
    ]
    assert [
        cell.state
        for cell in page(run_telemetry, key="k", taken_at=NOW, job=JobOutlook(has_ended=True)).ranks
    ][1] == "lost"
    earlier = replace(run_telemetry, attempts=(0, 1))
    assert page(earlier, key="k", taken_at=NOW).ranks[1].state == "lost"


def test_the_page_header_names_the_parent_run() -> None:
    assert "parent run" not in words.format_header(row(1), None, NOW)[1][0]
    assert words.format_header(row(2, parent="train-1"), None, NOW)[1][0].startswith(
        "attempt 0 · parent run train-1 · "
    )


def test_exit_code_85_is_shown_as_done() -> None:
    ranks = {0: RankTelemetry(rank=0, started=1, ended=2, exit_code=85)}
    assert page(RunTelemetry(now=NOW, attempt=0, ranks=ranks), key="k", taken_at=NOW).ranks[0].state == "done"


def test_points_and_events_accumulate_until_a_new_attempt() -> None:
    first = page_of(4)
    more = replace(telemetry_of(4), train=(TrainPoint(step=2010, loss=0.1),), events=({"event": "ended"},))
    second = page(more, key=first.key, taken_at=NOW, previous_page=first)
    assert len(second.points) == len(first.points) + 1
    assert [event["event"] for event in second.events][-1] == "ended"
    third = page(replace(more, attempt=1, attempts=(0, 1)), key=first.key, taken_at=NOW, previous_page=second)
    assert len(third.points) == 1


def test_a_long_run_is_thinned_and_keeps_its_newest_points() -> None:
    run_telemetry = RunTelemetry(
        now=NOW, attempt=0, train=tuple(TrainPoint(step=step, loss=1.0) for step in range(20_000))
    )
    made = page(run_telemetry, key="k", taken_at=NOW)
    assert len(made.points) <= MOST_POINTS
    assert made.points[-1].step == 19_999
    assert made.points[0].step == 0


def test_a_nan_loss_is_reported_and_not_drawn() -> None:
    values = [2.0, 1.5, math.nan, math.inf]
    train = tuple(TrainPoint(step=step, loss=value) for step, value in enumerate(values))
    made = page(RunTelemetry(now=NOW, attempt=0, train=train), key="k", taken_at=NOW)
    assert made.loss_diverged_at == 2
    assert made.series("loss") == [(0.0, 2.0), (1.0, 1.5)]
    assert page_of(4).loss_diverged_at is None


def test_the_page_computes_rates_and_shares_of_a_node() -> None:
    node = page_of(16).nodes[0]
    assert (node.receives, node.sends) == (1e9, 2e9)
    assert node.memory == 0.2
    assert node.alarms == ("GPU 0: slowed (thermal)",)


def test_a_sample_from_the_future_has_age_zero() -> None:
    sample = NodeSample(node="n1", node_rank=0, time=NOW + 500)
    made = page(RunTelemetry(now=NOW, attempt=0, nodes=(sample,)), key="k", taken_at=NOW)
    assert made.nodes[0].age == 0


def test_a_falling_curve_is_drawn_from_upper_left_to_lower_right() -> None:
    drawn = draw_curve([(0, 1.0), (1, 0.0)], 4, 2)
    assert [len(line) for line in drawn] == [4, 4]
    assert drawn[0][0] != " "
    assert drawn[1][-1] != " "
    assert drawn[0][-1] == drawn[1][0] == " "
    assert draw_bar(0.5, 4) == "██··"


values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e99, max_value=1e99)


@given(st.lists(st.tuples(values, values), max_size=50), st.integers(0, 60), st.integers(0, 20))
def test_arbitrary_curves_fit_their_area(points: list[tuple[float, float]], width: int, height: int) -> None:
    assert all(len(line) == width for line in draw_curve(points, width, height))
    assert len(draw_plot("loss", points, width, height)) <= max(1, height)


junk: Any = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from(["", "ended", "{job_id.x}", "\x1b[2J\n"])
    | st.lists(st.integers(), max_size=2)
)


KEYS = (
    "time", "exit_code", "ranks", "step", "job_id", "ok", "findings", "bytes", "total", "done", "wait_s",
    "action", "excluded", "rank", "node", "source", "summary",
)  # fmt: skip
NAMES = ("ended", "attempt_ended", "decision", "hang", "health", "staging", "onward", "{ranks.__class__}")


@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from(KEYS), junk), junk | st.sampled_from(NAMES)), max_size=6
    )
)
def test_arbitrary_events_become_lines_without_escape_sequences(
    named_events: list[tuple[dict[str, Any], object]],
) -> None:
    events = tuple({**values, "event": name} for values, name in named_events)
    result = words.format_timeline(Page(key="k", events=events), NOW)
    assert 1 <= len(result) <= max(1, len(events))
    assert not any("\n" in text or "\x1b" in text for text, _ in result)


def test_format_short_fits_an_axis() -> None:
    known = {
        0.0: "0",
        3e-4: "0.0003",
        12.345: "12.3",
        9999.0: "9999",
        407_412.0: "407.4k",
        1e6: "1M",
        1e99: "1e+99",
    }
    assert {value: words.format_short(value) for value in known} == known
    assert all(len(words.format_short(-(1.2345678 * 10.0**power))) <= 9 for power in range(-99, 99))
