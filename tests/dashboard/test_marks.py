"""Runs that are marked in the list, and their comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot

from dtslurm.cli.commands.compare import format_comparison
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import ComparisonText, Notification
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.reader import Reader
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.run_list import Board
from tests.dashboard.desk import Desk, join_feed_threads, row_of
from tests.dashboard.samples import NOW, SampleSource, board, row
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable


def test_space_marks_a_run_and_moves_to_the_next() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space", "space")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == ["000000000001", "000000000002"]
        assert "◆ llama-8b" in screen_text(app)
        assert "◆ llama-70b" in screen_text(app)
        assert screen_text(app).count("◆") == 2
        assert "2 marked" in screen_text(app)
        await pilot.press("k", "space")
        await wait_until_stable(pilot)
        assert app.screen.marked == ["000000000001"]
        await pilot.press("escape")
        await wait_until_stable(pilot)
        assert app.screen.marked == []

    use_app(what)


def test_queued_keys_mark_the_rows_that_the_cursor_reached() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for key, character in (("j", "j"), ("j", "j"), ("space", " "), ("j", "j"), ("space", " ")):
            app.post_message(Key(key, character))
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == ["000000000003", "000000000005"]

    use_app(what)


def test_marked_runs_are_compared_in_the_order_of_their_marks() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "space", "home", "space", "C")
        await wait_until_stable(pilot)
        assert source.asked == [("compare", "4702", "4701")]
        assert isinstance(app.screen, Reader)
        assert "state  FAILED  COMPLETED" in screen_text(app)
        await pilot.press("y")
        assert app.clipboard == "state  FAILED  COMPLETED\nloss by step"
        await pilot.press("q")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)

    use_app(what, source)


def test_a_comparison_is_not_shown_after_its_screen_was_left() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        source.post(ComparisonText(("state",)))
        await wait_until_stable(pilot)
        assert not isinstance(app.screen, Reader)

    use_app(what, source)


@pytest.mark.parametrize("marks", [0, 1, 9])
def test_two_to_eight_runs_can_be_compared(marks: int) -> None:
    source = SampleSource(board=Board(rows=tuple(row(number) for number in range(1, 12)), taken_at=NOW))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(*["space"] * marks, "C")
        await wait_until_stable(pilot)
        assert f"2 to 8 runs can be compared; {marks} are marked (space marks one)" in notification_text(app)
        assert source.asked == []

    use_app(what, source)


def test_marking_an_array_task_marks_its_run() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down", "down", "enter", "down", "space", "space")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == []  # both marks were of the same array
        await pilot.press("space")
        await wait_until_stable(pilot)
        assert app.screen.marked == ["a" * 12]

    use_app(what, source)


def test_a_mark_disappears_with_its_run() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space")
        source.post(Board(rows=board().rows[1:], taken_at=NOW))
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == []

    use_app(what, source)


def test_the_feed_compares_the_named_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch)
    rows = []
    for number, loss in ((1, 2.0), (2, 1.0)):
        record, files = desk.run(number, job=str(6 + number))
        files.start(1)
        files.rank(0, ended=2000, exit_code=0)
        files.lines("train.jsonl", {"step": 1, "loss": 3.0}, {"step": 2, "loss": loss})
        desk.say(str(6 + number), JobState.COMPLETED)
        rows.append(row_of(record))
    feed = desk.feed(render_comparison=lambda result: format_comparison(result, 78))
    feed.compare(rows)
    text = "\n".join(desk.next(ComparisonText).lines)
    join_feed_threads()
    assert "7 train" in text
    assert "last loss" in text
    assert "loss by step" in text
    assert "the requests are identical" in text
    feed.compare([rows[0], row_of(record, token="gone")])
    assert "no run" in desk.next(Notification).text
    join_feed_threads()
