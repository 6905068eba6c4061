"""The history pane: step times or GPU use over time, and the spark lines of the list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dtslurm.dashboard import feed as feed_module
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.charts.strip_view import StripView
from dtslurm.dashboard.charts.strips import (
    MOST_STRIPS,
    average_gpus,
    describe_strips,
    draw_spark_line,
    rebin,
    step_strips,
    utilization_strips,
)
from dtslurm.dashboard.feed import GpuUtilization, RunUtilization
from dtslurm.dashboard.rows import Rows
from dtslurm.model.runs.state import JobState
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.services.observe.run_list import Board
from dtslurm.services.observe.utilization_history import UtilizationHistory, UtilizationRow
from tests.dashboard.desk import Desk, join_feed_threads
from tests.dashboard.samples import NOW, SampleSource, board, page_of, row
from tests.dashboard.screen import screen_text, use_app, wait_until_stable


def rank_points(rank: int, seconds: float, steps: int = 20) -> list[TrainPoint]:
    return [TrainPoint(time=NOW + step, rank=rank, step=step, step_time_s=seconds) for step in range(steps)]


def test_the_slowest_rank_is_first_and_red() -> None:
    points = [*rank_points(0, 1.0), *rank_points(1, 1.0), *rank_points(2, 1.0), *rank_points(3, 2.0)]
    strips = step_strips(points, 10)
    assert strips is not None
    assert [(strip.label, strip.stands_out) for strip in strips.rows] == [
        ("rank 3", True), ("rank 0", False), ("rank 1", False), ("rank 2", False),
    ]  # fmt: skip
    cells = {strip.label: set(strip.cells) for strip in strips.rows}
    assert cells["rank 3"] == {("█", "bad")}
    assert cells["rank 0"] == {("▂", "good")}
    assert (strips.begin, strips.end) == (NOW, NOW + 19)
    assert len(strips.rows[0].cells) == 10


def test_a_rank_is_red_from_the_time_of_its_slowdown() -> None:
    late = [
        replace(point, step_time_s=3.0 if point.step and point.step >= 10 else 1.0)
        for point in rank_points(1, 1.0)
    ]
    strips = step_strips([*rank_points(0, 1.0), *rank_points(2, 1.0), *late], 20)
    assert strips is not None
    [slow] = [strip for strip in strips.rows if strip.label == "rank 1"]
    assert [kind for _, kind in slow.cells] == ["good"] * 10 + ["bad"] * 10


def test_step_times_are_derived_from_timestamps() -> None:
    points = [
        TrainPoint(time=NOW + step * pace, rank=rank, step=step)
        for rank, pace in ((0, 1.0), (1, 2.0), (2, 1.0))
        for step in range(10)
    ]
    strips = step_strips(points, 1)
    assert strips is not None
    assert strips.rows[0] == replace(strips.rows[0], label="rank 1", cells=(("█", "bad"),), stands_out=True)


def test_a_slow_rank_has_no_gaps_and_a_long_pause_is_a_gap() -> None:
    slow = [TrainPoint(time=NOW + 3 * step, rank=1, step=step, step_time_s=3.0) for step in range(7)]
    strips = step_strips([*rank_points(0, 1.0), *rank_points(2, 1.0), *slow], 20)
    assert strips is not None
    assert strips.rows[0].label == "rank 1"
    assert "".join(text for text, _ in strips.rows[0].cells) == "█" * 19 + " "  # its last step ended before
    gap = [*rank_points(1, 1.0)[:5], *rank_points(1, 1.0)[15:]]
    strips = step_strips([*rank_points(0, 1.0), *gap], 20)
    assert strips is not None
    assert "".join(text for text, _ in strips.rows[1].cells).count(" ") == 10


@pytest.mark.parametrize(
    "points",
    [
        [],
        rank_points(0, 1.0),
        [TrainPoint(step=1, rank=0), TrainPoint(step=1, rank=1)],
        [TrainPoint(time=NOW, step=1, rank=0), TrainPoint(time=NOW, step=1, rank=1)],
    ],
)
def test_step_strips_require_steps_of_two_ranks_over_time(points: list[TrainPoint]) -> None:
    assert step_strips(points, 10) is None


def test_outliers_are_kept_if_there_are_too_many_ranks() -> None:
    points = [
        point
        for rank in range(MOST_STRIPS + 100)
        for point in rank_points(rank, 2.0 if rank == 600 else 1.0, 2)
    ]
    strips = step_strips(points, 10)
    assert strips is not None
    assert (len(strips.rows), strips.left_out, strips.rows[0].label) == (MOST_STRIPS, 100, "rank 600")
    assert "100 more rows are not shown" in describe_strips(strips, NOW)[0][0]


USE = UtilizationHistory(
    begin=NOW - 600,
    end=NOW,
    rows=(
        UtilizationRow("gpu01 gpu 0", is_gpu=True, values=(90.0, 95.0, None, 100.0)),
        UtilizationRow("gpu01 gpu 1", is_gpu=True, values=(92.0, 20.0, 96.0, 60.0)),
        UtilizationRow("gpu02 gpu 0", is_gpu=True, values=(91.0, 93.0, 97.0, 98.0)),
        UtilizationRow("gpu02 gpu 1", is_gpu=True, values=(5.0, 4.0, 3.0, 2.0)),
        UtilizationRow("gpu01 cpu", is_gpu=False, values=(5.0, 5.0, 5.0, 5.0)),
    ),
)  # fmt: skip


def test_a_gpu_that_is_idle_while_others_work_is_first() -> None:
    strips = utilization_strips(USE, 96)
    assert [strip.label for strip in strips.rows] == [
        "gpu02 gpu 1", "gpu01 gpu 0", "gpu01 gpu 1", "gpu02 gpu 0",
    ]  # fmt: skip
    assert {kind for _, kind in strips.rows[0].cells} == {"bad"}
    assert strips.rows[1].cells[2] == (" ", "")
    assert [kind for _, kind in strips.rows[2].cells] == ["good", "warn", "good", "good"]


def test_without_gpus_cpu_use_is_shown() -> None:
    strips = utilization_strips(replace(USE, rows=USE.rows[-1:]), 96)
    assert [strip.label for strip in strips.rows] == ["gpu01 cpu"]
    assert strips.legend.startswith("CPU use")
    assert utilization_strips(replace(USE, rows=()), 96).rows == ()


def test_a_spark_line_shows_the_mean_use_of_all_gpus() -> None:
    assert average_gpus(replace(USE, rows=USE.rows[-1:]), 8) == ()
    assert average_gpus(USE, 4)[:2] == pytest.approx((69.5, 53.0))
    assert len(average_gpus(USE, 2)) == 2
    assert draw_spark_line((0.0, 50.0, 100.0, None, 12.5)) == "▁▅█ ▂"
    assert rebin((1.0, 3.0, None, 5.0), 2) == (2.0, 5.0)
    assert rebin((None, None, 1.0), 3) == (None, None, 1.0)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_the_history_pane_shows_the_slow_rank_first_with_a_legend(size: tuple[int, int]) -> None:
    points = tuple(point for rank in range(16) for point in rank_points(rank, 2.0 if rank == 7 else 1.0))
    source = SampleSource(page=lambda job: replace(page_of(16, job.key), points=points))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "6")
        await wait_until_stable(pilot)
        lines = screen_text(app).splitlines()
        [first] = [line for line in lines if "▲ rank 7" in line]
        assert "█" * 20 in first
        assert "▲ 1 outlier" in screen_text(app)
        assert "step time / median of all ranks" in screen_text(app)
        assert not [asked for asked in source.asked if asked[0] == "history"]

    use_app(what, source, size=size)


def test_without_steps_the_history_pane_requests_gpu_use_once() -> None:
    source = SampleSource(use=USE)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "6")
        await wait_until_stable(pilot)
        assert "▲ gpu02 gpu 1" in screen_text(app)
        assert "GPU use, 0 to 100 % by height" in screen_text(app)
        source.post(source.page(source.board.rows[0]))
        await wait_until_stable(pilot)
        assert [asked for asked in source.asked if asked[0] == "history"] == [("history", "4701", "0")]
        await pilot.press("G", "g", "j", "k", "pagedown")
        source.post(RunUtilization(source.board.rows[0].key, 5, replace(USE, rows=())))  # of another attempt
        await wait_until_stable(pilot)
        assert app.screen.query_one(StripView).strips.rows == ()

    use_app(what, source)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_the_list_has_a_gpu_use_column_if_there_are_samples(size: tuple[int, int]) -> None:
    source = SampleSource(board=Board(rows=board().rows[:2], clusters=board().clusters[:1], taken_at=NOW))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "GPU USE" not in screen_text(app)
        source.post(GpuUtilization({"000000000001": (0.0, 50.0, 100.0, 100.0), "gone": (1.0,)}))
        await wait_until_stable(pilot)
        assert "GPU USE" in screen_text(app)
        first, second = (app.screen.query_one(Rows).render_line(number).text for number in (1, 2))
        assert "▁▅██" in first
        assert not set(second) & set("▁▂▃▄▅▆▇█")

    use_app(what, source, size=size)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(feed_module, "_NEW_RUNS_S", 0.01)
    return Desk(tmp_path, monkeypatch)


def sample(time: float, util: float | None) -> dict[str, object]:
    gpus = [] if util is None else [{"index": 0, "util": util}]
    return {"time": time, "node": "n1", "node_rank": 0, "cpu_percent": 3.0, "gpus": gpus}


def test_the_feed_posts_the_gpu_use_of_runs_with_samples(desk: Desk) -> None:
    tokens = []
    for number, util in ((1, 80.0), (2, 20.0), (3, None)):
        record, files = desk.run(number, job=str(number))
        files.start(1)
        files.rank(0)
        files.lines("node-0.jsonl", sample(NOW - 20, util), sample(NOW - 5, util))
        tokens.append(record.token)
        ends = {"end_time": int(NOW), "exit_code": 0} if number == 2 else {}
        desk.say(
            str(number), JobState.COMPLETED if ends else JobState.RUNNING, start_time=int(NOW) - 60, **ends
        )
    feed = desk.feed()
    feed.start(desk.posts.put)
    result = desk.next(GpuUtilization, lambda value: len(value.values) == 2)
    feed.stop()
    join_feed_threads()
    assert result.values == {tokens[0]: (80.0, 80.0), tokens[1]: (20.0, 20.0)}


def test_the_feed_posts_the_utilization_history_of_an_attempt(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    files.lines("node-0.jsonl", sample(NOW - 20, 70.0), sample(NOW - 5, 90.0))
    feed = desk.feed()
    feed.history(row(1, key=record.token, token=record.token), 0)
    history = desk.next(RunUtilization).history
    join_feed_threads()
    assert [(gpu.label, gpu.values) for gpu in history.gpus] == [("n1 gpu 0", (70.0, 90.0))]
