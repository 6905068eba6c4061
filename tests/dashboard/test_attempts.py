"""A run of several attempts: their curves are one, and none that has ended is shown as live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dtslurm.dashboard import feed as feed_module
from dtslurm.dashboard import words
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.charts.curves import Curves, plot
from dtslurm.dashboard.feed import EarlierAttempts
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.services.observe.run_list import Board
from dtslurm.views.run_page import Page
from tests.dashboard.desk import Desk, over, row_of
from tests.dashboard.made import NOW, Made, page_of, row
from tests.dashboard.screen import seen, settled, use


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(feed_module, "_PAGE_S", 0.01)
    yield Desk(tmp_path, monkeypatch)
    over()


def points(first: int, last: int, loss: float) -> tuple[TrainPoint, ...]:
    return tuple(TrainPoint(time=NOW + step, step=step, loss=loss) for step in range(first, last + 1))


PAGE = Page(key="000000000001", attempt=2, attempts=(0, 1, 2), points=points(8, 20, 1.0))
EARLIER = {1: points(4, 12, 2.0), 0: points(1, 6, 3.0), 3: points(1, 99, 9.0)}


def test_the_curves_of_all_attempts_are_one_and_what_was_trained_again_counts() -> None:
    [(title, curve)] = words.curves(PAGE, 1, EARLIER)
    assert title == "loss 1"
    assert curve == [
        *((float(step), 3.0) for step in range(1, 4)),
        *((float(step), 2.0) for step in range(4, 8)),
        *((float(step), 1.0) for step in range(8, 21)),
    ]
    assert words.restarts(PAGE, EARLIER) == [4.0, 8.0]
    assert words.restarts(PAGE, {}) == []


def test_a_restart_is_a_line_behind_the_curve_and_the_axis_says_so() -> None:
    lines = plot("loss", [(float(x), float(x)) for x in range(101)], 58, 10, marks=[50.0, 500.0])
    assert [dots.index("┊") for _, dots in lines if "┊" in dots] == [24] * 7
    assert "step, ┊ restarts" in lines[-1][0]
    assert not any("┊" in label + dots for label, dots in plot("loss", [(0.0, 1.0), (9.0, 2.0)], 58, 10))


def test_the_page_joins_the_attempts_and_shows_a_chosen_one_alone() -> None:
    source = Made(page=lambda _: replace(PAGE, ranks=page_of(4).ranks))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        assert "┊" not in seen(app)
        source.post(EarlierAttempts("another", EARLIER))
        source.post(EarlierAttempts(PAGE.key, EARLIER))
        await settled(pilot)
        assert "step, ┊ restarts" in seen(app)
        [(_, curve), *_] = app.screen.query_one(Curves)._curves
        assert (curve[0], curve[-1]) == ((1.0, 3.0), (20.0, 1.0))
        await pilot.press("[")
        source.post(replace(PAGE, attempt=1, points=points(4, 12, 2.0)))
        await settled(pilot)
        assert "restarts" not in seen(app)

    use(what, source, size=(100, 30))


def test_the_feed_asks_for_earlier_attempts_once(desk: Desk) -> None:
    record, files = desk.run(1)
    for attempt in range(2):
        files.attempt = attempt
        files.start(1)
        files.rank(0)
        files.lines("train.jsonl", {"step": 1 + attempt, "loss": 1.0})
    feed = desk.feed()
    feed.watch(row_of(record, state="RUNNING"))
    found = desk.next(EarlierAttempts)
    assert {number: [point.step for point in told] for number, told in found.attempts.items()} == {0: [1]}
    for _ in range(3):
        desk.next(Page)
    feed.watch(None)
    over()
    rest = [desk.posts.get() for _ in range(desk.posts.qsize())]
    assert not [post for post in rest if isinstance(post, EarlierAttempts)]


@pytest.mark.parametrize(("attempt", "pending"), [(0, False), (None, True)])
def test_an_attempt_that_has_ended_has_no_forecast_and_no_activity(
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


def test_a_requeued_run_that_waits_is_not_live() -> None:
    waits = row(1, state="PENDING", pending=True, start=None, about="jobs of higher priority are ahead")

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await settled(pilot)
        assert "attempt 0 · ended · jobs of higher priority are ahead" in seen(app)
        assert "live" not in seen(app)
        assert "following" not in seen(app)

    use(what, Made(board=Board(rows=(waits,), taken_at=NOW)))


def test_an_earlier_attempt_says_that_it_has_ended() -> None:
    head = words.header(row(1), replace(page_of(4), attempt=1, attempts=(0, 1, 2)), NOW)
    assert head[1][0] == "attempt 1 · ended, attempt 2 is the newest"
