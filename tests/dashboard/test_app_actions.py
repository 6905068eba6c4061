"""Actions of the dashboard: confirmations, shells, copies, themes and commands."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from dtslurm.dashboard import start
from dtslurm.dashboard.app import Arrived, TopApp
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.feed import Diagnosed, Feed
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.rows import Rows
from dtslurm.errors import HostUnavailable, RequestInvalid
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.run_list import Board, JobRow
from dtslurm.services.wiring.context import Context
from tests.dashboard.desk import Desk, join_feed_threads
from tests.dashboard.samples import NOW, SampleSource, row
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable


def job_under_cursor(app: TopApp) -> str:
    """Return the id of the job under the cursor, empty if there is none."""
    assert isinstance(app.screen, JobsScreen)
    row = app.screen.row()
    return row.job_id if row is not None else ""


def test_the_answer_can_be_chosen_with_arrow_keys() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("c")
        await wait_until_stable(pilot)
        await pilot.press("right", "left", "enter")  # No
        assert source.asked == []
        await pilot.press("c")
        await wait_until_stable(pilot)
        await pilot.press("right", "enter")
        await wait_until_stable(pilot)
        assert source.asked == [("cancel", "4701")]

    use_app(what, source)


def test_palette_commands_ask_for_confirmation() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        commands = {command.title: command.callback for command in app.get_system_commands(app.screen)}
        await pilot.press("down")  # to one that waits
        for title in ("Cancel", "Requeue", "Hold", "Release"):
            commands[title]()
            await pilot.pause()
            assert isinstance(app.screen, Confirm)
            await pilot.press("n")
        commands["Refresh"]()
        assert source.asked == [("poke",)]
        commands["Help"]()
        await wait_until_stable(pilot)
        assert "the job before" not in screen_text(app)
        assert "query the clusters now" in screen_text(app)

    use_app(what, source)


def test_the_palette_of_a_dialog_has_no_job_actions() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("question_mark")
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Copy", "Cancel", "Shell"}.isdisjoint(titles)
        assert {"Help", "Refresh", "Quit"} <= titles

    use_app(what)


def test_f5_refreshes_the_board() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("f5")
        assert source.asked == [("poke",)]

    use_app(what, source)


def diagnosis_text(app: TopApp) -> str:
    assert isinstance(app.screen, JobScreen)
    return str(app.screen.query_one("#saying", Static).visual)


@pytest.mark.parametrize("keys", [("d",), ("enter", "d"), ("enter", "5", "d")])
def test_the_d_key_examines_every_rank_of_a_running_job(keys: tuple[str, ...]) -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(*keys)
        await wait_until_stable(pilot)
        assert ("live", "4701") in source.asked
        assert isinstance(app.screen, JobScreen)
        assert app.screen.pane == "verdict"
        assert "the job hangs (90%)" in diagnosis_text(app)
        source.post(Diagnosed(app.screen.row().key, ("nothing has failed so far",)))  # which came late
        await wait_until_stable(pilot)
        assert "the job hangs (90%)" in diagnosis_text(app)

    use_app(what, source)


def test_the_d_key_on_a_job_that_is_not_running_shows_a_message() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "d")
        assert "there are no ranks to examine: the job does not run" in notification_text(app)
        assert isinstance(app.screen, JobsScreen)
        assert not [asked for asked in source.asked if asked[0] == "live"]

    use_app(what, source)


def test_the_state_column_fits_a_stalled_state() -> None:
    activity = Activity(stalled=True, since=NOW - 745, quiet_s=745, summary="no work of any rank")
    source = SampleSource(board=Board(rows=(row(1, activity=activity),), taken_at=NOW))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "■ STALLED 12m25s " in screen_text(app)
        assert "d examines every rank" in screen_text(app)

    use_app(what, source)


class Shells(SampleSource):
    """A source whose shells end, or fail to open, as they are told to."""

    end: int | Exception = 0

    def shell(self, row: JobRow, node: str) -> int:
        super().shell(row, node)
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (0, ""),
        (3, "the shell ended with exit code 3"),
        (HostUnavailable("login is gone", hint="is the VPN up?"), "login is gone\nhint: is the VPN up?"),
        (OSError("no terminal"), "no terminal"),
    ],
)  # fmt: skip
def test_the_end_of_a_shell_is_reported(
    monkeypatch: pytest.MonkeyPatch, end: int | Exception, words: str
) -> None:
    source = Shells()
    source.end = end
    monkeypatch.setattr(TopApp, "suspend", lambda _: nullcontext())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x")
        await wait_until_stable(pilot)
        await pilot.press("y")
        await wait_until_stable(pilot)
        assert notification_text(app) == words
        assert isinstance(app.screen, JobsScreen)

    use_app(what, source)
    assert source.asked[0] == ("shell", "4701", "gpu01")


def test_a_terminal_that_cannot_be_suspended_is_reported() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.open_shell(source.board.rows[0], "gpu01")
        await wait_until_stable(pilot)
        assert notification_text(app) == "the shell needs a terminal: run dtslurm top in one"
        assert source.asked == []

    use_app(what, source)


def test_an_invalid_node_list_prevents_a_shell() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x")
        await wait_until_stable(pilot)
        assert notification_text(app) == "a shell needs a running job"
        assert isinstance(app.screen, JobsScreen)

    use_app(what, SampleSource(board=Board(rows=(row(1, nodelist="gpu[01-"),))))


def test_copying_works_if_the_copy_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    target = tmp_path / "state" / "copied.txt"

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y")
        assert app.clipboard == "4701\n/scratch/ada/runs/train-1"
        assert notification_text(app) in {
            f"copied 2 lines; {target}: Not a directory",
            f"copied 2 lines; {target}: File exists",
        }

    use_app(what, clipboard=target)


def test_keys_do_nothing_on_an_empty_list() -> None:
    source = SampleSource(board=Board())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y", "enter", "x", "c", "pagedown", "pageup")
        await wait_until_stable(pilot)
        assert (notification_text(app), app.clipboard, job_under_cursor(app)) == ("", "", "")
        assert isinstance(app.screen, JobsScreen)

    use_app(what, source)
    assert source.asked == [("stop",)]


def test_the_page_keys_stop_at_the_ends_of_the_list() -> None:
    rows = tuple(row(number) for number in range(1, 41))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        screenful = app.screen.query_one(Rows).size.height - 2
        await pilot.press("pagedown")
        assert job_under_cursor(app) == str(4701 + screenful)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert job_under_cursor(app) == "4740"
        await wait_until_stable(pilot)
        assert "train-40" in screen_text(app)
        await pilot.press("pageup")
        assert job_under_cursor(app) == str(4740 - screenful)
        await pilot.press("g")
        await wait_until_stable(pilot)
        assert job_under_cursor(app) == "4701"
        assert "train-40" not in screen_text(app)

    use_app(what, SampleSource(board=Board(rows=rows, taken_at=NOW)))


def test_a_click_on_a_column_title_sorts_and_then_reverses() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        title = str(app.screen.query_one(Rows).render_line(0).text)
        name, about = title.index("NAME"), title.index("ABOUT")
        await pilot.click(Rows, offset=(about, 0))
        await wait_until_stable(pilot)
        assert "▼" not in screen_text(app)
        await pilot.click(Rows, offset=(name, 0))
        await wait_until_stable(pilot)
        assert "NAME▼" in screen_text(app).splitlines()[2]
        await pilot.press("home")
        first = job_under_cursor(app)
        await pilot.click(Rows, offset=(name, 0))
        await wait_until_stable(pilot)
        await pilot.press("end")
        assert job_under_cursor(app) == first

    use_app(what, size=(110, 24))


def test_opening_a_job_that_has_disappeared_does_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        rows = app.screen.query_one(Rows)
        rows.post_message(Rows.Chosen(rows, "gone"))
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)

    use_app(what)


def test_a_click_below_the_rows_selects_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.click(Rows, offset=(5, app.screen.query_one(Rows).size.height - 1))
        await wait_until_stable(pilot)
        assert job_under_cursor(app) == "4701"

    use_app(what, SampleSource(board=Board(rows=(row(1), row(2)))))


def test_leave_job_on_the_list_does_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.leave_job()
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "4701" in screen_text(app)

    use_app(what)


def test_data_may_arrive_while_the_dashboard_closes() -> None:
    async def arrive(app: TopApp) -> None:
        while True:
            app.post_message(Arrived(app.board))
            await asyncio.sleep(0)

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobScreen)
        arrivals.append(asyncio.create_task(arrive(app)))

    arrivals: list[asyncio.Task[None]] = []
    use_app(what)


@pytest.fixture
def restored_interpreter_settings() -> Iterator[None]:
    """Leave the interpreter as it was found: the dashboard tunes it for its own process."""
    turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(turn)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def start_dashboard(
    monkeypatch: pytest.MonkeyPatch,
    *,
    theme: str | None = None,
    key: str | None = None,
    ascii_only: bool = False,
) -> tuple[str, str]:
    """Start the dashboard on what there is, and return its theme and what stands on its screen."""
    result: list[tuple[str, str]] = []

    def run(app: TopApp) -> None:
        async def look() -> None:
            async with app.run_test(size=(100, 24)) as pilot:
                for _ in range(200):
                    await wait_until_stable(pilot)
                    if "querying" not in screen_text(app):
                        break
                result.append((app.theme, screen_text(app)))

        asyncio.run(look())

    monkeypatch.setattr(TopApp, "run", run)
    feed = Feed(Context, lambda _: ("well",))
    start.run(feed, key=key, read_only=False, ascii_only=ascii_only, theme=theme)
    join_feed_threads()
    return result[0]


@pytest.mark.parametrize("theme", ["colour-blind", "nord", None])
@pytest.mark.usefixtures("restored_interpreter_settings")
def test_the_dashboard_starts_with_the_requested_theme(
    monkeypatch: pytest.MonkeyPatch, theme: str | None
) -> None:
    used, screen = start_dashboard(monkeypatch, theme=theme)
    assert used == (theme or "textual-dark")
    assert "no runs yet; dtslurm submit SCRIPT starts one" in screen


@pytest.mark.usefixtures("restored_interpreter_settings")
def test_the_dashboard_starts_with_the_named_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch)
    record, _ = desk.run(1)
    desk.run(2, job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    _, screen = start_dashboard(monkeypatch, key=record.token, ascii_only=True)
    assert "train  7 on local" in screen
    assert "1 overview" in screen


def test_an_unknown_theme_is_refused_with_a_list_of_themes() -> None:
    feed = Feed(Context, lambda _: ())
    with pytest.raises(RequestInvalid, match=r"no theme 'pink' \(available: .*, and 17 more\)"):
        start.run(feed, key=None, read_only=False, ascii_only=False, theme="pink")
