"""A run with several attempts: joined curves, and the display of ended attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dtslurm.dashboard import feed as feed_module
from dtslurm.dashboard import words
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.charts.curves import Curves, draw_plot
from dtslurm.dashboard.feed import EarlierAttempts
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.services.observe.run_list import Board
from dtslurm.views.run_page import Page
from tests.dashboard.desk import Desk, join_feed_threads, row_of
from tests.dashboard.samples import NOW, SampleSource, page_of, row
from tests.dashboard.screen import screen_text, use_app, wait_until_stable


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(feed_module, "_PAGE_S", 0.01)
    yield Desk(tmp_path, monkeypatch)
    join_feed_threads()


def points(first: int, last: int, loss: float) -> tuple[TrainPoint, ...]:
    return tuple(TrainPoint(time=NOW + step, step=step, loss=loss) for step in range(first, last + 1))


PAGE = Page(key="000000000001", attempt=2, attempts=(0, 1, 2), points=points(8, 20, 1.0))
EARLIER = {1: points(4, 12, 2.0), 0: points(1, 6, 3.0), 3: points(1, 99, 9.0)}


def test_curves_join_all_attempts_and_prefer_retrained_steps() -> None:
    [(title, curve)] = words.select_curves(PAGE, 1, EARLIER)
    assert title == "loss 1"
    assert curve == [
        *((float(step), 3.0) for step in range(1, 4)),
        *((float(step), 2.0) for step in range(4, 8)),
        *((float(step), 1.0) for step in range(8, 21)),
    ]
    assert words.find_restarts(PAGE, EARLIER) == [4.0, 8.0]
    assert words.find_restarts(PAGE, {}) == []


def test_a_restart_is_drawn_as_a_vertical_line_behind_the_curve() -> None:
    lines = draw_plot("loss", [(float(x), float(x)) for x in range(101)], 58, 10, marks=[50.0, 500.0])
    assert [dots.index("┊") for _, dots in lines if "┊" in dots] == [24] * 7
    assert "step, ┊ restarts" in lines[-1][0]
    assert not any("┊" in label + dots for label, dots in draw_plot("loss", [(0.0, 1.0), (9.0, 2.0)], 58, 10))


def test_the_page_shows_all_attempts_joined_or_a_selected_attempt() -> None:
    source = SampleSource(page=lambda _: replace(PAGE, ranks=page_of(4).ranks))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        assert "┊" not in screen_text(app)
        source.post(EarlierAttempts("another", EARLIER))
        source.post(EarlierAttempts(PAGE.key, EARLIER))
        await wait_until_stable(pilot)
        assert "step, ┊ restarts" in screen_text(app)
        [(_, curve), *_] = app.screen.query_one(Curves)._curves
        assert (curve[0], curve[-1]) == ((1.0, 3.0), (20.0, 1.0))
        await pilot.press("[")
        source.post(replace(PAGE, attempt=1, points=points(4, 12, 2.0)))
        await wait_until_stable(pilot)
        assert "restarts" not in screen_text(app)

    use_app(what, source, size=(100, 30))


def test_the_feed_reads_earlier_attempts_once(desk: Desk) -> None:
    record, files = desk.run(1)
    for attempt in range(2):
        files.attempt = attempt
        files.start(1)
        files.rank(0)
        files.lines("train.jsonl", {"step": 1 + attempt, "loss": 1.0})
    feed = desk.feed()
    feed.watch(row_of(record, state="RUNNING"))
    result = desk.next(EarlierAttempts)
    assert {number: [point.step for point in result] for number, result in result.attempts.items()} == {
        0: [1]
    }
    for _ in range(3):
        desk.next(Page)
    feed.watch(None)
    join_feed_threads()
    rest = [desk.posts.get() for _ in range(desk.posts.qsize())]
    assert not [post for post in rest if isinstance(post, EarlierAttempts)]


@pytest.mark.parametrize(("attempt", "pending"), [(0, False), (None, True)])
def test_a_finished_attempt_has_no_forecast_and_no_activity(
    desk: Desk, attempt: int | None, pending: bool
) -> None:
    record, files = desk.run(1)
    for number in range(1 if pending else 2):
        files.attempt = number
        files.start(1)
        files.rank(0)
        files.lines("train.jsonl", *({"step": step, "time": NOW - 900 + step} for step in range(1, 60)))
    feed = desk.feed()
    feed.watch(row_of(record, state="PENDING" if pending else "RUNNING", pending=pending), attempt)
    page = desk.next(Page)
    assert page.attempt == 0
    assert (page.forecast, page.activity) == (None, None)
    assert [cell.state for cell in page.ranks] == ["lost"]
    feed.watch(None)


def test_a_requeued_pending_run_is_not_shown_as_live() -> None:
    waits = row(1, state="PENDING", pending=True, start=None, about="jobs with a higher priority wait, too")

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await wait_until_stable(pilot)
        assert "attempt 0 · ended · jobs with a higher priority wait, too" in screen_text(app)
        assert "live" not in screen_text(app)
        assert "following" not in screen_text(app)

    use_app(what, SampleSource(board=Board(rows=(waits,), taken_at=NOW)))


def test_the_header_shows_that_an_earlier_attempt_has_ended() -> None:
    head = words.format_header(row(1), replace(page_of(4), attempt=1, attempts=(0, 1, 2)), NOW)
    assert head[1][0] == "attempt 1 · ended, attempt 2 is the newest"
