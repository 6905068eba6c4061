"""The dashboard in use: keys, the mouse, sizes, questions, and snapshots of all kinds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from dtslurm.dashboard import dialogs
from dtslurm.dashboard.app import Arrived, TopApp
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.feed import Told
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.logview import LogView
from dtslurm.dashboard.rows import Rows
from dtslurm.model.pulse import Pulse, TrainPoint
from dtslurm.services.board import Board, ClusterLine
from dtslurm.services.page import Page, page
from tests.dashboard.made import NOW, Made, app_of, board, many_jobs, page_of, row
from tests.dashboard.test_screens import seen, settled

Use = Callable[[Pilot[None], TopApp], Awaitable[None]]


def use(what: Use, source: Made | None = None, size: tuple[int, int] = (80, 24), **values: object) -> TopApp:
    app = app_of(source, **values)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await settled(pilot)
            await what(pilot, app)

    asyncio.run(run())
    return app


def told(app: TopApp) -> str:
    """Return what the person was told lately."""
    return " | ".join(note.message for note in app._notifications)


def test_nothing_is_done_without_a_yes() -> None:
    source = Made()
    verbs = {"c": "cancel", "R": "requeue", "H": "hold", "U": "release"}

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for verb, answer in zip(verbs, ("enter", "escape", "n", "q"), strict=True):
            await pilot.press(*(["down"] if verb == "U" else []), verb)
            assert isinstance(app.screen, Confirm)
            await pilot.press(answer)
            assert isinstance(app.screen, JobsScreen)
        assert source.asked == []
        await pilot.press("up")
        for verb in verbs:
            await pilot.press(*(["down"] if verb == "U" else []), verb)
            await settled(pilot)
            await pilot.press("y")
        await settled(pilot)
        jobs = ["4701", "4701", "4701", "4702"]
        assert source.asked == list(zip(verbs.values(), jobs, strict=True))

    use(what, source)


def test_what_runs_is_not_released() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("U")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "nothing to release: the job is not held" in told(app)

    use(what, source)


def test_why_a_job_waits_has_its_column_on_a_small_terminal_beside_a_scroll_bar() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await settled(pilot)
        clusters = tuple(ClusterLine(name=name, observed_at=NOW) for name in ("hpc", "other"))
        app.post_message(Arrived(replace(many_jobs(100), clusters=clusters)))
        await settled(pilot)
        head = seen(app).splitlines()[1]
        assert app.screen.query_one(Rows).room == 79
        assert head[:79].split() == ["STATE", "NAME", "JOB", "CLUSTER", "TIME/LIMIT", "DONE", "ABOUT"], head
        await pilot.press("slash", *"train-1")  # few are left, and no scroll bar
        await settled(pilot)
        assert app.screen.query_one(Rows).room == 80

    use(what, Made())


def test_keys_of_one_burst_go_where_they_were_meant_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow link brings many at once: what is typed into the filter must not cancel anything."""
    monkeypatch.setattr(dialogs, "_READING_S", 1e9)
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for key in "/cy":
            app.post_message(Key("slash" if key == "/" else key, key))
        await settled(pilot)
        assert app.screen.choice.words == "cy"  # type: ignore[attr-defined]
        await pilot.press("escape")
        for key in "cy":
            app.post_message(Key(key, key))
        await settled(pilot)
        assert isinstance(app.screen, Confirm)
        assert source.asked == []

    use(what, source)


def test_read_only_offers_and_does_nothing() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "READ-ONLY" in seen(app)
        for key in ("c", "y", "R", "y", "x", "y", "H", "y", "U", "y"):
            await pilot.press(key)
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "cancel" not in seen(app).lower().replace("cancelled", "")
        await pilot.press("question_mark")
        await settled(pilot)
        assert "all commands, themes" in seen(app)
        assert "requeue" not in seen(app)

    use(what, source, read_only=True)
    assert {asked[0] for asked in source.asked} <= {"stop"}


def test_filter_sort_and_fold() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("slash", *"llama")
        await settled(pilot)
        assert "4701" in seen(app)
        assert "4705" not in seen(app)
        await pilot.press("enter", "down")
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.row() is not None
        await pilot.press("escape")
        await settled(pilot)
        assert "4705" in seen(app)
        await pilot.press("t")
        assert "4705" not in seen(app)
        await pilot.press("t", *"ssssssss", "S")
        await settled(pilot)
        assert "4705" in seen(app)

    use(what)


def test_the_cursor_stays_on_its_job_when_others_come() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down")
        assert app.screen.row().job_id == "4703"  # type: ignore[attr-defined]
        newer = row(0, job_id="4800", key="new", token="new", created=NOW)
        source.post(replace(source.board, rows=(newer, *source.board.rows)))
        await settled(pilot)
        assert app.screen.row().job_id == "4703"  # type: ignore[attr-defined]
        assert "4800" in seen(app)

    use(what, source)


def test_the_mouse_chooses_opens_sorts_and_changes_panes() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.click(Rows, offset=(20, 2))
        assert app.screen.row().job_id == "4702"  # type: ignore[attr-defined]
        await pilot.click(Rows, offset=(14, 0))
        assert app.screen.choice.sort == "name"  # type: ignore[attr-defined]
        await pilot.click(Rows, offset=(20, 1), times=2)
        await settled(pilot)
        assert isinstance(app.screen, JobScreen)
        await pilot.click("#tabs", offset=(17, 0))
        await settled(pilot)
        assert app.screen.pane == "ranks"

    use(what)


def test_two_thousand_jobs() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("end")
        await settled(pilot)
        assert app.screen.row().job_id == "6700"  # type: ignore[attr-defined]
        await pilot.press("slash", *"train-1999")
        await settled(pilot)
        assert "6699" in seen(app)

    use(what, Made(board=many_jobs()))


def test_ten_thousand_ranks() -> None:
    def big(_: object) -> Page:
        return page_of(10_000)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await settled(pilot)
        grid = app.screen.query_one(RankGrid)
        assert len(grid.cells) == 10_000
        assert not grid.cards
        await pilot.press("o")
        assert grid.cursor == 5
        await pilot.press("end")
        await settled(pilot)
        assert grid.cursor == 9999
        assert "rank 9999" in seen(app)
        for mode in ("gpu", "memory", "silence", "state"):
            await pilot.press("m")
            assert grid.mode == mode
        await pilot.press("enter")
        await settled(pilot)
        assert app.screen.pane == "logs"  # type: ignore[attr-defined]

    source = Made(board=Board(rows=(row(1, ranks=10_000),)), page=big)
    use(what, source)
    assert ("follow", "4701", "9999") in source.asked


def test_logs_are_searched_filtered_and_harmless() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await settled(pilot)
        view = app.screen.query_one("#log", LogView)
        place = view.scroll_offset.y
        assert view.count - place <= view.size.height  # it follows
        assert "\x1b" not in seen(app)
        assert "wiped? �" in seen(app)
        await pilot.press("home", "slash", *"step 7 ", "enter")
        await settled(pilot)
        assert "step 7 loss" in seen(app)
        assert view.scroll_offset.y < place
        place = view.scroll_offset.y
        await pilot.press("n")
        await settled(pilot)
        assert view.scroll_offset.y > place
        await pilot.press("e")
        await settled(pilot)
        assert "CUDA out of memory" in seen(app)
        await pilot.press("f", *"out of memory", "enter")
        await settled(pilot)
        assert view.count == 1
        await pilot.press("escape", "end")
        await settled(pilot)
        assert view.count > 200
        await pilot.press("slash", "(", "enter")
        await settled(pilot)
        assert "not a regular expression" in told(app)
        await pilot.press("escape", "escape")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)

    use(what)


def test_ranks_whose_log_is_wanted_are_asked_for() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4", "r", *"0,2-3", "enter")
        await settled(pilot)
        await pilot.press("r", *"x", "enter")
        await settled(pilot)
        assert "names no ranks" in told(app)

    use(what, source)
    assert ("follow", "4701", "0,2-3") in source.asked


def test_copying_also_writes_a_file(tmp_path: Path) -> None:
    target = tmp_path / "state" / "copied.txt"

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y")
        assert app.clipboard == "4701\n/scratch/ada/runs/train-1"
        await pilot.press("enter", "4")
        await settled(pilot)
        await pilot.press("y")

    use(what, clipboard=target)
    assert "RuntimeError: CUDA out of memory" in target.read_text()
    assert "\x1b" not in target.read_text()


def test_the_shell_opens_on_a_node_of_a_running_job_after_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Made()
    opened: list[tuple[str, str]] = []
    monkeypatch.setattr(TopApp, "open_shell", lambda self, job, node: opened.append((job.job_id, node)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x", "enter", "x")
        await settled(pilot)
        await pilot.press("y", "enter", "3", "down", "x")
        await settled(pilot)
        await pilot.press("y")
        await settled(pilot)
        await pilot.press("q", "down", "x")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)  # a pending job has no node

    use(what, source)
    assert opened == [("4701", "gpu01"), ("4701", "gpu02")]


@pytest.mark.parametrize("size", [(20, 5), (1, 1)])
def test_no_size_is_too_small(size: tuple[int, int]) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for pane in "12345":
            await pilot.press(pane)
            await settled(pilot)
        await pilot.press("question_mark", "escape", "q", "c", "n")
        await pilot.resize_terminal(80, 24)
        await settled(pilot)
        await pilot.resize_terminal(*size)
        await settled(pilot)

    use(what, size=size)


def test_a_cluster_that_never_answered_and_a_user_without_runs() -> None:
    dead = Board(clusters=(ClusterLine(name="hpc", trouble="there is no link to login.hpc"),), taken_at=NOW)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "no link to login.hpc" in seen(app)
        assert "no runs yet" in seen(app)
        await pilot.press("enter", "c", "x", "y", "R", "down", "up", "end", "home")
        await settled(pilot)

    use(what, Made(board=dead))


def test_a_lost_link_is_said_and_the_last_picture_stays() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        before = page_of(16)
        source.post(replace(before, trouble="the link was cut", taken_at=NOW - 42))
        await settled(pilot)
        assert "the link was cut; last seen 42s ago" in seen(app)
        assert "tokens/s" in seen(app)
        source.post(before)
        await settled(pilot)
        assert "live" in seen(app)

    use(what, source)


BAD_PAGES = {
    "nothing": Page(key="000000000001"),
    "no metrics": page(Pulse(now=NOW, attempt=0, world_size=3), key="000000000001", taken_at=NOW),
    "no number": page(
        Pulse(
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


def test_bad_input_is_drawn_all_the_same() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        for bad in BAD_PAGES.values():
            source.post(bad)
            for pane in "1235":
                await pilot.press(pane)
        await settled(pilot)
        assert isinstance(app.screen, JobScreen)

    use(what, source)


def test_words_for_the_person_are_shown_as_they_are() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.post_message(Arrived(Told("[bold]no[/] markup [", bad=True)))
        await settled(pilot)
        assert "[bold]no[/] markup [" in told(app)

    use(what)


def test_a_job_named_at_the_start_opens_at_once() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert isinstance(app.screen, JobScreen)
        assert app.screen.row().job_id == "4705"
        assert app.screen.pane == "verdict"
        assert "gpu-out-of-memory" in str(app.screen.query_one("#saying", Static).visual)

    use(what, job=lambda job: job.job_id == "4705")


def test_ascii_is_all_that_is_drawn_where_it_is_all_there_is() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for keys in (["enter"], ["2"], ["3"], ["4"], ["question_mark"]):
            await pilot.press(*keys)
            await settled(pilot)
            drawn = "".join(
                segment.text
                for widget in app.screen.query(Widget)
                for strip in widget.render_lines(Region(0, 0, *widget.size))
                for segment in strip
            )
            assert drawn.isascii(), sorted({letter for letter in drawn if not letter.isascii()})

    use(what, ascii_only=True)


@pytest.mark.parametrize("theme", ["colour-blind", "ansi-dark"])
def test_themes(theme: str) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.theme = theme
        await settled(pilot)
        await pilot.press("enter", "2")
        await settled(pilot)
        assert "stand out" in seen(app)

    use(what)


def test_no_color_draws_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await settled(pilot)
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                if segment.style is not None and segment.style.color is not None:
                    triplet = segment.style.color.get_truecolor()
                    assert triplet.red == triplet.green == triplet.blue

    use(what)


def test_the_palette_knows_the_actions() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Theme", "Help", "Copy", "Cancel", "Requeue", "Hold", "Release", "Shell"} <= titles
        await pilot.press("ctrl+p")
        await settled(pilot)
        await pilot.press("escape")
        app.read_only = True
        assert "Cancel" not in {command.title for command in app.get_system_commands(app.screen)}

    use(what)


def test_boards_of_the_same_rows_change_nothing() -> None:
    assert board() == board()
