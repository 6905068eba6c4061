"""Runs that are marked in the list, and their comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot

from dtslurm.cli.commands.compare import lines
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import ComparisonText, Notification
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.reader import Reader
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.run_list import Board
from tests.dashboard.desk import Desk, over, row_of
from tests.dashboard.made import NOW, Made, board, row
from tests.dashboard.screen import seen, settled, told, use


def test_space_marks_the_run_and_goes_on_to_the_next() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space", "space")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == ["000000000001", "000000000002"]
        assert "◆ llama-8b" in seen(app)
        assert "◆ llama-70b" in seen(app)
        assert seen(app).count("◆") == 2
        assert "2 marked" in seen(app)
        await pilot.press("k", "space")
        await settled(pilot)
        assert app.screen.marked == ["000000000001"]
        await pilot.press("escape")
        await settled(pilot)
        assert app.screen.marked == []

    use(what)


def test_of_keys_that_come_together_each_marks_where_the_last_one_led() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for key, character in (("j", "j"), ("j", "j"), ("space", " "), ("j", "j"), ("space", " ")):
            app.post_message(Key(key, character))
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == ["000000000003", "000000000005"]

    use(what)


def test_marked_runs_are_compared_in_the_order_of_their_marks() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "space", "home", "space", "C")
        await settled(pilot)
        assert source.asked == [("compare", "4702", "4701")]
        assert isinstance(app.screen, Reader)
        assert "state  FAILED  COMPLETED" in seen(app)
        await pilot.press("y")
        assert app.clipboard == "state  FAILED  COMPLETED\nloss by step"
        await pilot.press("q")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)

    use(what, source)


def test_what_comes_after_its_screen_was_left_is_shown_nowhere_else() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        source.post(ComparisonText(("state",)))
        await settled(pilot)
        assert not isinstance(app.screen, Reader)

    use(what, source)


@pytest.mark.parametrize("marks", [0, 1, 9])
def test_two_to_eight_runs_can_be_compared(marks: int) -> None:
    source = Made(board=Board(rows=tuple(row(number) for number in range(1, 12)), taken_at=NOW))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(*["space"] * marks, "C")
        await settled(pilot)
        assert f"2 to 8 runs can be compared; {marks} are marked (space marks one)" in told(app)
        assert source.asked == []

    use(what, source)


def test_a_task_is_marked_as_its_run() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down", "down", "enter", "down", "space", "space")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == []  # both marks were of the same array
        await pilot.press("space")
        await settled(pilot)
        assert app.screen.marked == ["a" * 12]

    use(what, source)


def test_a_mark_goes_with_its_run() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space")
        source.post(Board(rows=board().rows[1:], taken_at=NOW))
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.marked == []

    use(what, source)


def test_the_feed_compares_the_runs_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch)
    rows = []
    for number, loss in ((1, 2.0), (2, 1.0)):
        record, files = desk.run(number, job=str(6 + number))
        files.start(1)
        files.rank(0, ended=2000, exit_code=0)
        files.lines("train.jsonl", {"step": 1, "loss": 3.0}, {"step": 2, "loss": loss})
        desk.say(str(6 + number), JobState.COMPLETED)
        rows.append(row_of(record))
    feed = desk.feed(say_comparison=lambda found: lines(found, 78))
    feed.compare(rows)
    text = "\n".join(desk.next(ComparisonText).lines)
    over()
    assert "7 train" in text
    assert "last loss" in text
    assert "loss by step" in text
    assert "the requests are identical" in text
    feed.compare([rows[0], row_of(record, token="gone")])
    assert "no run" in desk.next(Notification).text
    over()
