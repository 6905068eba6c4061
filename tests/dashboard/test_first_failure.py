"""The display of the first failed rank, and its log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from textual.pilot import Pilot

from dtslurm.dashboard import frame, words
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.logview import LogView
from dtslurm.model.runs.telemetry import FirstFailure, RankTelemetry
from dtslurm.services.observe.run_list import Board, JobRow
from dtslurm.views.run_page import JobOutlook, Page, page
from tests.dashboard.samples import NOW, SampleSource, row, telemetry_of
from tests.dashboard.screen import (
    notification_text,
    screen_text,
    use_app,
    wait_until_shown,
    wait_until_stable,
)

FAILURE = FirstFailure(rank=3, exit_code=1, error="RuntimeError: CUDA out of memory", file="/w/f.py", line=6)
SENTENCE = "failed first: rank 3 (RuntimeError: CUDA out of memory, f.py:6); 3 terminated after it"
AWAY_FROM_THE_END = "End goes to the end"  # below the log when it has gone to the error


def failed_page(ranks: int = 4, key: str = "000000000005") -> Page:
    ended: dict[str, Any] = {"started": 1, "ended": 2, "last_output_at": NOW}
    cells = {
        rank: RankTelemetry(rank=rank, exit_code=143, told_to_end=True, **ended) for rank in range(ranks)
    }
    cells[3] = RankTelemetry(rank=3, exit_code=1, **ended)
    pulse = replace(telemetry_of(4), ranks=cells, world_size=ranks, first_failure=FAILURE)
    return page(pulse, key=key, taken_at=NOW, job=JobOutlook(has_ended=True))


def failed_job(**values: object) -> JobRow:
    known = {"name": "vit", "state": "FAILED", "over": True, "end": int(NOW) - 100, "ranks": 4}
    return row(5, **{**known, **values})


def source(ranks: int = 4) -> SampleSource:
    return SampleSource(board=Board(rows=(failed_job(),)), page=lambda job: failed_page(ranks, job.key))


def test_terminated_ranks_are_not_outliers() -> None:
    made = failed_page()
    assert [cell.state for cell in made.ranks] == ["terminated"] * 3 + ["failed"]
    assert [cell.rank for cell in made.outliers] == [3]
    assert words.describe_outliers(made) == [(SENTENCE, "bad")]


def test_a_first_failure_without_an_exception_shows_the_exit_code() -> None:
    bare = replace(failed_page(), first_failure=FirstFailure(rank=3, exit_code=9))
    assert words.format_rank_line(bare)[0].startswith("failed first: rank 3 (exit code 9); 3 terminated")


def test_one_frame_lists_the_first_failed_rank_first() -> None:
    job = failed_job()
    lines = frame.render_frame(Board(rows=(job,)), failed_page(), job.key, width=100, now=NOW)
    assert SENTENCE in lines
    ranks = [line for line in lines if line.startswith("rank ")]
    assert ranks[0].startswith("rank 3: failed")


def test_the_first_failed_rank_is_selected_and_enter_opens_its_log_at_the_error() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        grid = app.screen.query_one(RankGrid)
        assert (grid.cursor, grid.chosen and grid.chosen.rank) == (0, 3)
        assert SENTENCE[:70] in screen_text(app)
        await pilot.press("enter")
        await wait_until_shown(pilot, AWAY_FROM_THE_END)
        assert app.screen.query_one("#log", LogView)._marked is not None
        await wait_until_shown(pilot, "RuntimeError: CUDA out of memory")

    use_app(what, source())


def test_in_a_large_grid_the_first_failed_rank_is_selected_in_its_place() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        grid = app.screen.query_one(RankGrid)
        assert (grid.cards, grid.cursor) == (False, 3)
        await pilot.press("right")
        app._arrive(failed_page(256))
        await wait_until_stable(pilot)
        assert grid.cursor == 4  # it is chosen once

    use_app(what, source(256))


def test_the_log_of_a_failed_run_opens_at_the_error_without_following() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await wait_until_shown(pilot, AWAY_FROM_THE_END)
        log = app.screen.query_one("#log", LogView)
        assert log._marked is not None
        assert log.store.lines([log._marked])[0] == ("3", FAILURE.error)
        assert "following" not in screen_text(app)
        await pilot.press("end")
        await wait_until_stable(pilot)
        assert "at the end" in screen_text(app)
        assert "following" not in screen_text(app)

    use_app(what, source())


def test_a_failed_search_shows_the_direction_of_the_next_match() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4", "end", "slash", *"CUDA", "enter")
        await wait_until_stable(pilot)
        await pilot.press("n")
        await wait_until_stable(pilot)
        assert "no match below or above: this is the only one" in notification_text(app)
        await pilot.press("e")
        await wait_until_stable(pilot)
        assert "no line that looks like an error below" in notification_text(app)
        await pilot.press("home", "slash", *["backspace"] * 4, *"step 59", "enter")
        await wait_until_stable(pilot)
        await pilot.press("N", "N", "N", "N")
        await wait_until_stable(pilot)
        assert "no match above; n goes down" in notification_text(app)
        await pilot.press("n", "n", "n", "n", "n")
        await wait_until_stable(pilot)
        assert "no match below; N goes up" in notification_text(app)

    use_app(what, source())


def test_the_l_key_loads_earlier_lines() -> None:
    made = source()
    made.skipped = True

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await wait_until_stable(pilot)
        assert "the last 20,000 lines of each file, L loads earlier ones" in screen_text(app)
        await pilot.press("L")
        await wait_until_stable(pilot)
        assert made.followed == (None, 200_000)
        made.skipped = False
        await pilot.press("L")
        await wait_until_stable(pilot)
        await pilot.press("L")
        await wait_until_stable(pilot)
        assert "there are no earlier lines" in notification_text(app)

    use_app(what, made, size=(160, 30))


def test_panes_show_loading_until_data_arrive() -> None:
    class Slow(SampleSource):
        def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
            pass

        def follow(self, row: JobRow | None, *rest: object, **values: object) -> None:
            pass

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for key in "1234":
            await pilot.press(key)
            await wait_until_stable(pilot)
            assert "loading" in screen_text(app)
            assert "yet" not in screen_text(app)

    use_app(what, Slow(board=Board(rows=(failed_job(),))))
