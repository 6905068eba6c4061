"""The list of runs: progress bars, and the panel on the run under the cursor."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from textual.widgets import Static

from dtslurm.dashboard import words
from dtslurm.dashboard.charts.curves import Curves, draw_plot
from dtslurm.dashboard.charts.plot import smooth, take_logarithms
from dtslurm.services.observe.run_list import add_page
from dtslurm.views.forecast import Forecast
from tests.dashboard import samples
from tests.dashboard.samples import NOW, SampleSource, app_of, row
from tests.dashboard.screen import wait_until_stable


def test_a_progress_bar_names_steps_or_time() -> None:
    steps = row(1, forecast=Forecast(step=20_000, total=50_000, pace=3.2, done_at=NOW + 9375))
    assert words.draw_progress(steps, NOW)[0] == "███▎···· 40% steps 2h36m"
    assert words.draw_progress(row(1, start=int(NOW) - 3600, limit=7200), NOW)[0] == "████···· 50% time 1h00m"


@pytest.mark.parametrize(
    "values",
    [
        {"limit": None},
        {"state": "PENDING", "pending": True, "start": None},
        {"state": "UNKNOWN", "unknown": True},
        {"state": "COMPLETED", "over": True, "ok": True},
    ],
    ids=str,
)
def test_a_run_without_known_progress_has_no_bar(values: dict[str, object]) -> None:
    assert words.draw_progress(row(1, **values), NOW)[0] == ""


def test_a_stalled_run_shows_no_remaining_time() -> None:
    stalled = Forecast(step=10, total=100, pace=1.0, done_at=NOW + 90, stalled=True)
    assert words.draw_progress(row(1, forecast=stalled), NOW)[0].endswith("10% steps")


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({}, "dtslurm logs -f 4701"),
        ({"state": "FAILED", "over": True}, "dtslurm diagnose 4701"),
        ({"state": "CANCELLED", "over": True}, "dtslurm report 4701"),
        ({"state": "UNKNOWN", "job_id": "?"}, "dtslurm status 000000000001"),
    ],
    ids=str,
)
def test_the_next_command_depends_on_the_state(values: dict[str, object], command: str) -> None:
    assert words.suggest_command(row(1, **values)) == command


def test_the_panel_follows_the_cursor_without_requests() -> None:
    async def look() -> None:
        board = samples.board()
        first = add_page(board.rows[0], samples.page_of())
        source = SampleSource(board=replace(board, rows=(first, *board.rows[1:])))
        app = app_of(source)
        async with app.run_test(size=(120, 40)) as pilot:
            await wait_until_stable(pilot)
            assert app.screen.query_one("#panel").display
            assert not app.screen.query_one("#about").display
            assert app.screen.query_one(Curves).display
            await pilot.press("down", "down", "down", "down")
            await wait_until_stable(pilot)
            text = str(app.screen.query_one("#facts", Static).visual)
            assert "rank 3 failed first" in text
            assert "dtslurm diagnose 4705" in text
            assert not app.screen.query_one(Curves).display
            assert source.asked == []

    asyncio.run(look())


def test_a_narrow_terminal_shows_the_cause_below_the_list() -> None:
    async def look() -> None:
        app = app_of()
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until_stable(pilot)
            await pilot.press("down", "down", "down", "down")
            await wait_until_stable(pilot)
            assert not app.screen.query_one("#panel").display
            assert "rank 3 failed first" in str(app.screen.query_one("#detail", Static).visual)

    asyncio.run(look())


def test_a_plot_has_value_labels_and_step_labels() -> None:
    lines = [label + dots for label, dots in draw_plot("loss", [(10, 4.0), (2000, 1.0)], 40, 8)]
    assert lines[1].startswith("     4 ┤")
    assert lines[-2].startswith("     1 ┤")
    assert lines[-1].startswith("       └10")
    assert lines[-1].endswith("2000")
    assert {len(line) for line in lines} == {40}


def test_smoothing_starts_at_the_first_value() -> None:
    assert smooth([(0, 4.0), (1, 2.0)], 0.5) == [(0, 4.0), (1, 3.0)]
    assert smooth([]) == []


def test_a_logarithmic_axis_is_labelled_with_original_values() -> None:
    points = take_logarithms([(0, 0.0), (1, 100.0), (2, 1.0)])
    assert points == [(1, 2.0), (2, 0.0)]
    lines = [label for label, _ in draw_plot("loss", points, 40, 8, logarithmic=True)]
    assert lines[1] == "   100 ┤"
    assert lines[-2] == "     1 ┤"


def test_keys_smooth_and_maximise_the_curves() -> None:
    async def look() -> None:
        app = app_of()
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until_stable(pilot)
            await pilot.press("z")  # nothing to zoom in a narrow list
            await wait_until_stable(pilot)
            assert not app.screen.has_class("-maximized-view")
            await pilot.press("enter")
            await wait_until_stable(pilot)
            await pilot.press("z", "a", "l")
            await wait_until_stable(pilot)
            curves = app.screen.query_one(Curves)
            assert app.screen.maximized is curves
            assert curves.size.height > 20
            assert "smoothed, log scale" in curves.render().plain
            await pilot.press("escape")
            await wait_until_stable(pilot)
            assert not app.screen.has_class("-maximized-view")
            assert len(app.screen_stack) == 2

    asyncio.run(look())
