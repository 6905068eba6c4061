"""The dashboard with very many jobs or ranks, without data, and on unusual terminals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget

from dtslurm.dashboard.app import Arrived, TopApp
from dtslurm.dashboard.feed import Notification
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.rows import Rows
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.services.observe.run_list import Board, ClusterLine
from dtslurm.views.run_page import Page, page
from tests.dashboard.samples import NOW, SampleSource, board, many_jobs, page_of, row
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable


def test_a_narrow_terminal_has_an_about_column_beside_a_scroll_bar() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await wait_until_stable(pilot)
        clusters = tuple(ClusterLine(name=name, observed_at=NOW) for name in ("hpc", "other"))
        app.post_message(Arrived(replace(many_jobs(100), clusters=clusters)))
        await wait_until_stable(pilot)
        head = screen_text(app).splitlines()[2].strip("│")
        assert app.screen.query_one(Rows).room == 77
        assert head[:77].split() == ["STATE", "NAME", "JOB", "CLUSTER", "TIME/LIMIT", "DONE", "ABOUT"], head
        await pilot.press("slash", *"train-1")  # few are left, and no scroll bar
        await wait_until_stable(pilot)
        assert app.screen.query_one(Rows).room == 78

    use_app(what, SampleSource())


def test_the_list_handles_two_thousand_jobs() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("end")
        await wait_until_stable(pilot)
        assert app.screen.row().job_id == "6700"  # type: ignore[attr-defined]
        await pilot.press("slash", *"train-1999")
        await wait_until_stable(pilot)
        assert "6699" in screen_text(app)

    use_app(what, SampleSource(board=many_jobs()))


def test_the_rank_grid_handles_ten_thousand_ranks() -> None:
    def big(_: object) -> Page:
        return page_of(10_000)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        grid = app.screen.query_one(RankGrid)
        assert len(grid.cells) == 10_000
        assert not grid.cards
        await pilot.press("o")
        assert grid.cursor == 5
        await pilot.press("end")
        await wait_until_stable(pilot)
        assert grid.cursor == 9999
        assert "rank 9999" in screen_text(app)
        for mode in ("gpu", "memory", "silence", "state"):
            await pilot.press("m")
            assert grid.mode == mode
        await pilot.press("enter")
        await wait_until_stable(pilot)
        assert app.screen.pane == "logs"  # type: ignore[attr-defined]

    source = SampleSource(board=Board(rows=(row(1, ranks=10_000),)), page=big)
    use_app(what, source)
    assert ("follow", "4701", "9999") in source.asked


@pytest.mark.parametrize("size", [(20, 5), (1, 1)])
def test_very_small_terminals_cause_no_error(size: tuple[int, int]) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for pane in "12345":
            await pilot.press(pane)
            await wait_until_stable(pilot)
        await pilot.press("question_mark", "escape", "q", "c", "n")
        await pilot.resize_terminal(80, 24)
        await wait_until_stable(pilot)
        await pilot.resize_terminal(*size)
        await wait_until_stable(pilot)

    use_app(what, size=size)


def test_keys_cause_no_error_without_runs_and_without_an_answer() -> None:
    dead = Board(clusters=(ClusterLine(name="hpc", trouble="there is no link to login.hpc"),), taken_at=NOW)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "no link to login.hpc" in screen_text(app)
        assert "no runs yet" in screen_text(app)
        await pilot.press("enter", "c", "x", "y", "R", "down", "up", "end", "home")
        await wait_until_stable(pilot)

    use_app(what, SampleSource(board=dead))


def test_a_lost_connection_is_reported_and_the_last_page_stays() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        before = page_of(16)
        source.post(replace(before, trouble="the link was cut", taken_at=NOW - 42))
        await wait_until_stable(pilot)
        assert "the link was cut; last update 42s ago" in screen_text(app)
        assert "tokens/s" in screen_text(app)
        source.post(before)
        await wait_until_stable(pilot)
        assert "live" in screen_text(app)

    use_app(what, source)


BAD_PAGES = {
    "nothing": Page(key="000000000001"),
    "no metrics": page(RunTelemetry(now=NOW, attempt=0, world_size=3), key="000000000001", taken_at=NOW),
    "no number": page(
        RunTelemetry(
            now=NOW,
            attempt=0,
            train=tuple(
                TrainPoint(step=step, time=NOW, loss=value, total_steps=10**18)
                for step, value in enumerate([math.nan, 1e308, -1e308, math.inf, 0.0])
            ),
        ),
        key="000000000001",
        taken_at=NOW,
    ),
    "events that are none": Page(
        key="000000000001", events=({"time": "x"}, {"event": None, "time": math.nan})
    ),
}


def test_malformed_pages_are_drawn() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for bad in BAD_PAGES.values():
            source.post(bad)
            for pane in "1235":
                await pilot.press(pane)
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobScreen)

    use_app(what, source)


def test_notifications_are_not_parsed_as_markup() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.post_message(Arrived(Notification("[bold]no[/] markup [", bad=True)))
        await wait_until_stable(pilot)
        assert "[bold]no[/] markup [" in notification_text(app)

    use_app(what)


def test_ascii_mode_draws_only_ascii_characters() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for keys in (["enter"], ["2"], ["3"], ["4"], ["question_mark"]):
            await pilot.press(*keys)
            await wait_until_stable(pilot)
            drawn = "".join(
                segment.text
                for widget in app.screen.query(Widget)
                for strip in widget.render_lines(Region(0, 0, *widget.size))
                for segment in strip
            )
            assert drawn.isascii(), sorted({letter for letter in drawn if not letter.isascii()})

    use_app(what, ascii_only=True)


@pytest.mark.parametrize("theme", ["colour-blind", "ansi-dark"])
def test_colour_blind_and_ansi_themes_are_drawn(theme: str) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.theme = theme
        await wait_until_stable(pilot)
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        assert "outliers: " in screen_text(app)

    use_app(what)


def test_no_color_draws_only_shades_of_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                if segment.style is not None and segment.style.color is not None:
                    triplet = segment.style.color.get_truecolor()
                    assert triplet.red == triplet.green == triplet.blue

    use_app(what)


def test_boards_of_equal_rows_are_equal() -> None:
    assert board() == board()
